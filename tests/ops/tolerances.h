/* SPDX-License-Identifier: MIT
 *
 * How far a kernel may be from the reference: error <= bound * (|expected| + root mean square of the expected
 * array), on normally distributed inputs. One table; whoever loosens a line changes its reason. A float has
 * 6e-8 of rounding. */
#ifndef FSDP_TESTS_TOLERANCES_H
#define FSDP_TESTS_TOLERANCES_H

/* X(name, bound, reason) */
#define TOLERANCES(X)                                                                                 \
    X(TOL_EXACT, 0.0,                                                                                 \
      "the same roundings in the same order as the reference: moves, additions, row-order sums")      \
    X(TOL_ROUNDED, 2e-7, "one or two roundings where the reference has none: scaling, beta")          \
    X(TOL_ACT, 1e-6, "own exp (8e-8) and a few roundings; slopes cancel where they cross zero")       \
    X(TOL_ROW_SUM, 2e-6,                                                                              \
      "fp32 sums of up to 1600 terms in 16 lanes, then a few roundings: norms, losses, dbias")        \
    X(TOL_GEMM, 5e-6, "fp32 sums of up to 4096 products in the library's order")                      \
    X(TOL_ATTENTION, 1e-5,                                                                            \
      "two products and an exponential of scores whose own rounding is 1e-6 of e^score")              \
    X(TOL_DIFFERENCE, 4e-3,                                                                           \
      "central differences, step 2^-7, of fp32 outputs: rounding 6e-8 / 2^-7, truncation 2^-14 f'''") \
    X(TOL_LOSS, 2e-7, "row losses are fp64, of fp32 exponentials whose errors average out")

enum {
#define TOL_ENUM(name, bound, reason) name,
    TOLERANCES(TOL_ENUM)
#undef TOL_ENUM
};

static inline double tolerance(int which)
{
    static const double bounds[] = {
#define TOL_BOUND(name, bound, reason) bound,
        TOLERANCES(TOL_BOUND)
#undef TOL_BOUND
    };
    return bounds[which];
}

#endif
