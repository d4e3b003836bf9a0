/* SPDX-License-Identifier: MIT
 *
 * The life of a unit, as data: states, events, the conditions under which an event is allowed, and what it does. The
 * code checks calls against these tables (life.c), docs/life.md is printed from them, and tests/shard/life_test.c
 * walks them.
 *
 * A unit is in three states at once:
 *
 *   residency   SHARDED    only slices exist here
 *               AHEAD      gathered before its turn; nobody uses it yet
 *               WHOLE      in use: `holders` > 0 counts forwards, backwards and summons that are open
 *               KEPT       whole, not in use: between forward and backward (grad-op, or the root of the pass), or
 *                          until the parameters change (optimizer, none, or unsharded by hand)
 *   gradient    NONE       nothing in flight (committed gradients may exist: `accumulated`)
 *               OPEN       a backward writes into a window, or a block
 *               PENDING    posted; reduced or owed; or kept, without sync; counts when the pass ends
 *   outside of passes: idle, summoned, or in a step
 *
 * Invariants, asserted by fsdpi_unit_check() in debug builds after every event:
 *   I1  whole == NULL exactly in SHARDED
 *   I2  holders > 0 exactly in WHOLE
 *   I3  the gradient is OPEN exactly while a window, or in a pass without sync a block, is held
 *   I4  in OPEN and PENDING a pass is open, and it is that pass's
 *   I5  summoned or in a step: no pass is open on the communicator
 *   I6  a unit that is whole is whole at the version that this rank last saw published
 *   I7  in a step the gradient is NONE
 *   I8  a copy to write, or of the host, exists exactly while summoned with writeback or to the host, and for this rank
 *   I9  passes open on the communicator == 0 implies holders == summons, or 0 where the summon holds nothing here
 *   I10 no pass is open implies the gradient is NONE and nothing is owed
 *   I11 moves between states are those of the tables below */
#ifndef FSDPI_SHARD_LIFE_H
#define FSDPI_SHARD_LIFE_H

#include <fsdp/unit.h>

#define FSDPI_RESIDENCY_MAP(X)                                                                              \
    X(FSDPI_SHARDED, "sharded")                                                                             \
    X(FSDPI_AHEAD, "gathered ahead")                                                                        \
    X(FSDPI_WHOLE, "whole")                                                                                 \
    X(FSDPI_KEPT, "kept whole")

#define FSDPI_GRADIENT_MAP(X)                                                                               \
    X(FSDPI_GRAD_NONE, "no gradient in flight")                                                             \
    X(FSDPI_GRAD_OPEN, "gradient being written")                                                            \
    X(FSDPI_GRAD_PENDING, "gradient reduced, its pass not ended")

/* The moves there are. X(from, to, when). A call may make two at once; what is KEPT with old values is AHEAD on its way to WHOLE. */
#define FSDPI_RESIDENCY_MOVE_MAP(X)                                                                         \
    X(FSDPI_SHARDED, FSDPI_AHEAD, "another unit begins, after which this one came in the pass before, or is listed; a prefetch by hand") \
    X(FSDPI_SHARDED, FSDPI_KEPT, "it is unsharded by hand")                                                 \
    X(FSDPI_AHEAD, FSDPI_KEPT, "it is unsharded by hand")                                                   \
    X(FSDPI_SHARDED, FSDPI_WHOLE, "forward, backward or summon begins: it is gathered")                     \
    X(FSDPI_AHEAD, FSDPI_WHOLE, "its turn has come")                                                        \
    X(FSDPI_AHEAD, FSDPI_SHARDED, "the pass ends without it; a reshard by hand; room is made for another")                                        \
    X(FSDPI_WHOLE, FSDPI_KEPT, "the last holder ends: the root, grad-op, or a recompute, before its backward; modes optimizer and none; unsharded by hand") \
    X(FSDPI_WHOLE, FSDPI_SHARDED, "the last holder ends")                                                   \
    X(FSDPI_KEPT, FSDPI_WHOLE, "forward, backward or summon begins: gathered again only where it has new values") \
    X(FSDPI_KEPT, FSDPI_SHARDED, "its backward ends, or the pass; a reset; new values; a reshard by hand; room is made for another")

#define FSDPI_GRADIENT_MOVE_MAP(X)                                                                          \
    X(FSDPI_GRAD_NONE, FSDPI_GRAD_OPEN, "backward begins: a window is acquired, or without sync a block")                            \
    X(FSDPI_GRAD_OPEN, FSDPI_GRAD_PENDING, "backward ends and no forward is left to undo, or the pass ends: the window is posted, the block kept") \
    X(FSDPI_GRAD_PENDING, FSDPI_GRAD_OPEN, "backward begins again in the same pass: one more round")        \
    X(FSDPI_GRAD_PENDING, FSDPI_GRAD_NONE, "the pass ends: it counts; or is cancelled")                     \
    X(FSDPI_GRAD_OPEN, FSDPI_GRAD_NONE, "the pass is cancelled")

/* What must hold for a call. X(condition, when it does not hold, the way out) */
#define FSDPI_CONDITION_MAP(X)                                                                              \
    X(FSDPI_NO_PASS, "a pass is open", "end the pass, or cancel it, first")                                 \
    X(FSDPI_THIS_PASS, "the pass is not open on the unit's communicator", "begin a pass on it")             \
    X(FSDPI_TRAIN, "it is an evaluation pass", "begin it as FSDP_PASS_TRAIN")                               \
    X(FSDPI_NOT_SUMMONED, "it is summoned", "end the summon first")                                         \
    X(FSDPI_SUMMONED, "it is not summoned", "summon it first")                                              \
    X(FSDPI_NOT_IN_STEP, "it is in a step", "end the step first")                                           \
    X(FSDPI_IN_STEP, "it is in no step", "fsdp_step_begin() first")                                         \
    X(FSDPI_NOT_AVERAGED, "its average is in its place", "fsdp_ema_swap_out() first")                       \
    X(FSDPI_AVERAGED, "its average is not in its place", "fsdp_ema_swap_in() first")                        \
    X(FSDPI_FORWARD_OPEN, "no forward of it is open in this pass", "begin its forward first")               \
    X(FSDPI_FORWARD_TO_UNDO, "every forward of this pass has had its backward", "a backward needs a forward of its own") \
    X(FSDPI_RECOMPUTE_OPEN, "no recompute of it is open in this pass", "begin the recompute first")         \
    X(FSDPI_BACKWARD_OPEN, "no backward of it is open in this pass", "begin its backward first")            \
    X(FSDPI_NO_BACKWARD_OPEN, "a backward of it is open", "end the backward first")                         \
    X(FSDPI_NOT_HELD, "it is in use", "end its forward, backward or summon first")                          \
    X(FSDPI_NO_OTHER_PENDING, "another pass has gradients of it that do not count yet", "end that pass first") \
    X(FSDPI_READABLE, "its parameters are not whole here", "use them between begin and end, or summon the unit") \
    X(FSDPI_NO_GRADIENTS, "it has gradients that no step has used", "make a step, or drop them by fsdp_unit_zero_grad(), first") \
    X(FSDPI_WRITEBACK_OR_OUTER, "it is already summoned read-only", "ask for writeback in the outermost summon")

/* What may happen to a unit. X(event, call, conditions in the order in which they are looked at, what it does) */
#define FSDPI_C(c) (1u << (c))
#define FSDPI_EVENT_MAP(X)                                                                                  \
    X(FSDPI_EV_BEGIN_FORWARD, "fsdp_unit_begin_forward",                                                    \
      FSDPI_C(FSDPI_THIS_PASS),                                                                             \
      "residency -> WHOLE, one more holder; from SHARDED it is gathered")                                   \
    X(FSDPI_EV_END_FORWARD, "fsdp_unit_end_forward",                                                        \
      FSDPI_C(FSDPI_THIS_PASS) | FSDPI_C(FSDPI_FORWARD_OPEN),                                               \
      "one holder less; the last: KEPT (grad-op or root, in training; optimizer, none), else SHARDED")      \
    X(FSDPI_EV_BEGIN_RECOMPUTE, "fsdp_unit_begin_recompute",                                                \
      FSDPI_C(FSDPI_THIS_PASS) | FSDPI_C(FSDPI_TRAIN) | FSDPI_C(FSDPI_FORWARD_TO_UNDO),                     \
      "as begin_forward, but it is a forward that was: no backward is owed for it")                         \
    X(FSDPI_EV_END_RECOMPUTE, "fsdp_unit_end_recompute",                                                    \
      FSDPI_C(FSDPI_THIS_PASS) | FSDPI_C(FSDPI_RECOMPUTE_OPEN),                                             \
      "one holder less; the last: KEPT, since its backward comes next")                                     \
    X(FSDPI_EV_BEGIN_BACKWARD, "fsdp_unit_begin_backward",                                                  \
      FSDPI_C(FSDPI_THIS_PASS) | FSDPI_C(FSDPI_TRAIN) | FSDPI_C(FSDPI_NO_BACKWARD_OPEN) |                   \
          FSDPI_C(FSDPI_FORWARD_TO_UNDO) | FSDPI_C(FSDPI_NO_OTHER_PENDING),                                 \
      "as begin_forward; gradient NONE -> OPEN (a window is acquired), or stays OPEN")                      \
    X(FSDPI_EV_END_BACKWARD, "fsdp_unit_end_backward",                                                      \
      FSDPI_C(FSDPI_THIS_PASS) | FSDPI_C(FSDPI_BACKWARD_OPEN),                                              \
      "one holder less; the last: SHARDED, or KEPT (optimizer, none). No forward left to undo: OPEN -> PENDING (posted)") \
    X(FSDPI_EV_SUMMON_BEGIN, "fsdp_unit_summon_begin",                                                      \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_WRITEBACK_OR_OUTER),              \
      "residency -> WHOLE, one more holder; with writeback a private copy to write. To the host, or for another rank: no holder") \
    X(FSDPI_EV_SUMMON_END, "fsdp_unit_summon_end",                                                          \
      FSDPI_C(FSDPI_SUMMONED),                                                                              \
      "one holder less; the last: with writeback the own slice is published; SHARDED, or KEPT")             \
    X(FSDPI_EV_SUMMON_CANCEL, "fsdp_unit_summon_cancel",                                                    \
      FSDPI_C(FSDPI_SUMMONED),                                                                              \
      "one holder less; the last: what was written is dropped; SHARDED, or KEPT")                           \
    X(FSDPI_EV_UNSHARD, "fsdp_unit_unshard", FSDPI_C(FSDPI_NOT_IN_STEP),                                    \
      "whole until fsdp_unit_reshard() or new values: SHARDED, AHEAD -> KEPT; from SHARDED it is gathered") \
    X(FSDPI_EV_RESHARD, "fsdp_unit_reshard", FSDPI_C(FSDPI_NOT_HELD),                                       \
      "AHEAD, KEPT -> SHARDED; nothing in mode none")                                                       \
    X(FSDPI_EV_PREFETCH, "fsdp_unit_prefetch", FSDPI_C(FSDPI_NOT_IN_STEP),                                  \
      "SHARDED -> AHEAD, where there is room and a gather copies anything")                                 \
    X(FSDPI_EV_SET_PREFETCH, "fsdp_unit_set_prefetch", FSDPI_C(FSDPI_NO_PASS),                              \
      "from now on these are gathered ahead when it begins")                                                \
    X(FSDPI_EV_FILL, "fsdp_unit_init",                                                                      \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_SUMMONED) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_NOT_AVERAGED), \
      "new values are made, and published where all ranks have theirs; SHARDED, or KEPT until it is used")  \
    X(FSDPI_EV_CHECK_REPLICAS, "fsdp_unit_check_replicas",                                                  \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_IN_STEP),                                                  \
      "nothing")                                                                                            \
    X(FSDPI_EV_REWRITE, "fsdp_units_rewrite",                                                               \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_SUMMONED) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_NOT_AVERAGED), \
      "masters are written, and published; gradients stay; SHARDED, or KEPT until it is used")              \
    X(FSDPI_EV_SWAP_IN, "fsdp_ema_swap_in",                                                                 \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_SUMMONED) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_NOT_AVERAGED), \
      "as a rewrite, with the average; it is averaged")                                                     \
    X(FSDPI_EV_SWAP_OUT, "fsdp_ema_swap_out",                                                               \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_SUMMONED) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_AVERAGED), \
      "the other way round")                                                                                \
    X(FSDPI_EV_STEP_BEGIN, "fsdp_step_begin",                                                               \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_SUMMONED) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_NOT_AVERAGED), \
      "in a step: parameters cannot be read; gradients are final")                                          \
    X(FSDPI_EV_STEP_END, "fsdp_step_end", FSDPI_C(FSDPI_IN_STEP),                                           \
      "masters are published, gradients dropped")                                                           \
    X(FSDPI_EV_SAVE, "fsdp_checkpoint_save",                                                                \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_NOT_AVERAGED),                                                  \
      "nothing: masters are read as last published")                                                        \
    X(FSDPI_EV_LOAD, "fsdp_checkpoint_load",                                                                \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_SUMMONED) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_NOT_AVERAGED),                    \
      "as fsdp_unit_init")                                                                                  \
    X(FSDPI_EV_STATE_READ, "fsdp_state_read",                                                               \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_NOT_AVERAGED),                                                  \
      "nothing: masters are read as last published")                                                        \
    X(FSDPI_EV_STATE_LOAD, "fsdp_state_load",                                                               \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_SUMMONED) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_NOT_AVERAGED),                    \
      "as fsdp_unit_init")                                                                                  \
    X(FSDPI_EV_SET_HOOKS, "fsdp_unit_set_grad_hooks",                                                       \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_IN_STEP),                                                  \
      "gradients pass through hooks from now on")                                                           \
    X(FSDPI_EV_ZERO_GRAD, "fsdp_unit_zero_grad",                                                            \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_IN_STEP),                                                  \
      "accumulated gradients are dropped")                                                                  \
    X(FSDPI_EV_READ_GRAD, "fsdp_unit_read_grad", FSDPI_C(FSDPI_IN_STEP), "nothing")                         \
    X(FSDPI_EV_FREEZE, "fsdp_unit_set_frozen",                                                              \
      FSDPI_C(FSDPI_NO_PASS) | FSDPI_C(FSDPI_NOT_IN_STEP) | FSDPI_C(FSDPI_NO_GRADIENTS),                    \
      "a parameter has no gradient from now on, or has one again")                                          \
    X(FSDPI_EV_PARAM, "fsdp_unit_param", FSDPI_C(FSDPI_READABLE), "nothing")                                \
    X(FSDPI_EV_GRAD, "fsdp_unit_grad", FSDPI_C(FSDPI_BACKWARD_OPEN), "nothing")

#define FSDPI_FIRST_COLUMN(e, ...) e,
typedef enum fsdpi_residency { FSDPI_RESIDENCY_MAP(FSDPI_FIRST_COLUMN) } fsdpi_residency;
typedef enum fsdpi_gradient { FSDPI_GRADIENT_MAP(FSDPI_FIRST_COLUMN) } fsdpi_gradient;
typedef enum fsdpi_condition { FSDPI_CONDITION_MAP(FSDPI_FIRST_COLUMN) FSDPI_CONDITION_COUNT } fsdpi_condition;
typedef enum fsdpi_event { FSDPI_EVENT_MAP(FSDPI_FIRST_COLUMN) FSDPI_EVENT_COUNT } fsdpi_event;

/* FSDP_OK, or FSDP_ERR_STATE with the unit, its state and the way out. Changes nothing. pass: NULL where none. */
fsdp_status fsdpi_life_allows(const fsdp_unit *u, fsdpi_event ev, const fsdp_pass *pass);

const char *fsdpi_event_call(fsdpi_event ev);
unsigned fsdpi_event_conditions(fsdpi_event ev);

/* Whether it has gradients that count and that no step has used. */
bool fsdpi_unit_has_gradients(const fsdp_unit *u);

/* The only places where states change. At log level DEBUG each move is a line (fsdp/log.h). To the same state: no move. */
void fsdpi_unit_move(fsdp_unit *u, fsdpi_residency to);
void fsdpi_unit_move_gradient(fsdp_unit *u, fsdpi_gradient to);
/* The line for what is counted: so many of `what` ("forwards") are open now, after a change by so many. */
void fsdpi_unit_opened(const fsdp_unit *u, const char *what, int now, int by);

/* Whether this is a move of the tables, or none. */
bool fsdpi_residency_may_move(fsdpi_residency from, fsdpi_residency to);
bool fsdpi_gradient_may_move(fsdpi_gradient from, fsdpi_gradient to);

/* Asserts the invariants; does nothing in release builds. */
void fsdpi_unit_check(fsdp_unit *u);
/* For debuggers: prints all of a unit's state to stderr. */
void fsdpi_unit_dump(const fsdp_unit *u);

#endif
