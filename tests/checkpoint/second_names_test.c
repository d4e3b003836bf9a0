/* SPDX-License-Identifier: MIT
 *
 * A parameter that modules share is saved once, under its first name, with its optimizer state, steps and average; all of them load
 * under either name: into a tree in which the other name comes first, into a program that knows only one of the names, and from
 * checkpoints and dictionaries that have no second names; on any number of ranks. */
#include "format/scratch.h"
#include "support/ranks.h"

#include <fsdp/state.h>

#include <xxhash.h>

enum { VOCAB = 13, WIDTH = 6, ROWS = 4, STEPS = 2, LEAVES = 30 };

static const char *const part_name[] = { "table", "body", "head" };

/* table (embedding) -> body (linear) -> head (linear, whose weight is the table's). */
typedef struct net {
    fsdp_comm *comm;
    fsdp_device *device;
    fsdp_module *part[3], *model;
    fsdp_optim *optim;
    fsdp_ema *ema;
    fsdp_checkpoint *c;
} net;

typedef enum registering {
    WITH_SECOND_NAMES, /* as the tree has them */
    FIRST_ALONE,       /* as before there were any */
    SECOND_ALONE,      /* a program that has never heard of the first */
} registering;

static fsdp_status run(fsdp_module *m, void *ctx, fsdp_tape *tape, fsdp_tensor *in, fsdp_tensor **out)
{
    const net *n = ctx;
    fsdp_tensor *a, *b;
    (void)m;
    FSDP_TRY(fsdp_forward(n->part[0], tape, in, &a));
    FSDP_TRY(fsdp_forward(n->part[1], tape, a, &b));
    fsdp_tensor_release(a);
    FSDP_TRY(fsdp_forward(n->part[2], tape, b, out));
    fsdp_tensor_release(b);
    return FSDP_OK;
}

static fsdp_status make_model(net *n, const corner *c, bool head_first)
{
    fsdp_module *child[3];
    const char *name[3];
    FSDP_TRY(fsdp_embedding(&n->part[0], VOCAB, WIDTH));
    FSDP_TRY(fsdp_linear(&n->part[1], WIDTH, WIDTH, &(fsdp_linear_opts){ .bias = true, .activation = FSDP_ACT_GELU_TANH }));
    FSDP_TRY(fsdp_linear(&n->part[2], WIDTH, VOCAB, &(fsdp_linear_opts){ .bias = true }));
    FSDP_TRY(fsdp_module_share_param(n->part[2], 0, n->part[0], 0));
    FSDP_TRY(fsdp_wrap(&n->part[1], n->part[1], &(fsdp_wrap_opts){ .comm = n->comm, .mode = c->mode, .compute_device = n->device }));
    for (int i = 0; i < 3; i++) {
        child[i] = n->part[head_first ? 2 - i : i];
        name[i] = part_name[head_first ? 2 - i : i];
    }
    FSDP_TRY(fsdp_module_create(&n->model, &(fsdp_module_opts){ .type = "net", .forward = run, .ctx = n, .children = child, .names = name, .child_count = 3 }));
    return fsdp_wrap(&n->model, n->model, &(fsdp_wrap_opts){ .comm = n->comm, .mode = c->mode, .compute_device = n->device });
}

static fsdp_status register_all(net *n, registering how, fsdp_checkpoint **out)
{
    const fsdp_module_param_info *p;
    int count;
    FSDP_TRY(fsdp_checkpoint_create(out, n->comm));
    if (how == WITH_SECOND_NAMES) FSDP_TRY(fsdp_checkpoint_add_module(*out, "net.", n->model));
    FSDP_TRY(fsdp_module_params(n->model, &p, &count));
    for (int i = 0; i < count && how != WITH_SECOND_NAMES; i++) {
        char name[64];
        snprintf(name, sizeof(name), "net.%s", how == SECOND_ALONE && p[i].alias_count > 0 ? p[i].aliases[0] : p[i].name);
        FSDP_TRY(fsdp_checkpoint_add_param(*out, name, p[i].unit, p[i].index));
    }
    FSDP_TRY(fsdp_checkpoint_add_optim(*out, n->optim));
    return fsdp_checkpoint_add_ema(*out, n->ema);
}

static fsdp_status open_net(net *n, fsdp_comm *world, const corner *c, bool head_first, registering how)
{
    *n = (net){ .comm = world };
    FSDP_TRY(fsdp_device_open(&n->device, c->device));
    FSDP_TRY(make_model(n, c, head_first));
    FSDP_TRY(fsdp_module_init_keyed(n->model, FSDP_INIT_KAIMING, 5));
    FSDP_TRY(fsdp_optim_create_adamw(&n->optim, fsdp_module_units(n->model), &(fsdp_adamw_opts){ .lr = 0.02f }));
    FSDP_TRY(fsdp_ema_create(&n->ema, fsdp_module_units(n->model)));
    return register_all(n, how, &n->c);
}

static void close_net(net *n)
{
    fsdp_checkpoint_destroy(n->c);
    fsdp_ema_destroy(n->ema);
    fsdp_optim_destroy(n->optim);
    fsdp_module_destroy(n->model);
    fsdp_device_close(n->device);
}

static fsdp_status micro_batch(net *n, int64_t leaf)
{
    fsdp_tape *tape;
    fsdp_tensor *ids, *labels, *scores, *loss;
    int32_t x[ROWS], y[ROWS];
    for (int i = 0; i < ROWS; i++) {
        x[i] = (int32_t)((leaf * ROWS + i) * 7 % VOCAB);
        y[i] = (int32_t)((leaf * ROWS + i) * 5 % VOCAB);
    }
    FSDP_TRY(fsdp_tape_begin_with(&tape, n->comm, &(fsdp_tape_opts){ .device = n->device }));
    FSDP_TRY(fsdp_tensor_from_i32(&ids, tape, x, 2, (int64_t[]){ 1, ROWS }));
    FSDP_TRY(fsdp_tensor_from_i32(&labels, tape, y, 2, (int64_t[]){ 1, ROWS }));
    FSDP_TRY(fsdp_forward(n->model, tape, ids, &scores));
    FSDP_TRY(fsdp_op_cross_entropy(tape, scores, labels, &loss));
    FSDP_TRY(fsdp_backward(tape, loss));
    return fsdp_tape_end(tape);
}

static fsdp_status train(net *n)
{
    for (int s = 0; s < STEPS; s++) {
        for (int leaf = fsdp_comm_rank(n->comm); leaf < LEAVES; leaf += fsdp_comm_size(n->comm)) FSDP_TRY(micro_batch(n, s * LEAVES + leaf));
        FSDP_TRY(fsdp_optim_step(n->optim, NULL));
        FSDP_TRY(fsdp_ema_update(n->ema, 0.5f));
    }
    return FSDP_OK;
}

/* Under `name` in a, and `other` in b: the same elements, and as many steps. */
static bool same(const fsdp_state *a, const char *name, const fsdp_state *b, const char *other)
{
    static const char *const belongs[] = { "", "optim.exp_avg.", "optim.exp_avg_sq.", "ema." };
    char x[100], y[100];
    int64_t i, k;
    for (int what = 0; what < 4; what++) {
        snprintf(x, sizeof(x), "%snet.%s", belongs[what], name);
        snprintf(y, sizeof(y), "%snet.%s", belongs[what], other);
        const fsdp_state_tensor *s = fsdp_state_find(a, x), *t = fsdp_state_find(b, y);
        if (s == NULL || t == NULL || s->count != t->count || memcmp(s->data, t->data, (size_t)s->count * sizeof(float)) != 0) return false;
    }
    snprintf(x, sizeof(x), "optim.steps.net.%s", name);
    snprintf(y, sizeof(y), "optim.steps.net.%s", other);
    return fsdp_state_i64(a, x, &i) == FSDP_OK && fsdp_state_i64(b, y, &k) == FSDP_OK && i == STEPS && k == STEPS;
}

/* It has taken over all that `want` has, under the names that it knows. */
static fsdp_status check(net *n, registering how, bool head_first, const fsdp_state *want)
{
    static const char *const rest[] = { "body.weight", "body.bias", "head.bias" };
    fsdp_state *got;
    FSDP_TRY(fsdp_state_read(&got, n->c, NULL));
    rank_check(fsdp_state_count(got) == 16); /* each tensor once */
    if (how != (head_first ? FIRST_ALONE : SECOND_ALONE)) rank_check(same(want, "table.weight", got, "table.weight"));
    if (how != (head_first ? SECOND_ALONE : FIRST_ALONE)) rank_check(same(want, "head.weight", got, "head.weight"));
    for (int i = 0; i < 3; i++) rank_check(same(want, rest[i], got, rest[i]));
    fsdp_state_destroy(got);
    return FSDP_OK;
}

/* A net of other values, however registered, loads it: from a folder, or (path NULL) a dictionary. */
static fsdp_status load_into(fsdp_comm *world, const corner *c, bool head_first, registering how, const char *path, const fsdp_state *s, const fsdp_state *want)
{
    net n;
    fsdp_load_report report;
    FSDP_TRY(open_net(&n, world, c, head_first, how));
    if (path != NULL) FSDP_TRY(fsdp_checkpoint_load_with(n.c, path, &(fsdp_load_opts){ .report = &report }));
    else FSDP_TRY(fsdp_state_load(n.c, s, &(fsdp_load_opts){ .report = &report }));
    rank_check(report.loaded == 20 && report.missing == 0 && report.unexpected == 0); /* 16 tensors, 4 counts of steps */
    FSDP_TRY(check(&n, how, head_first, want));
    close_net(&n);
    return FSDP_OK;
}

/* What has second names fits everywhere, also where they are turned round; what has none fits where they are known. */
static fsdp_status load_everywhere(fsdp_comm *world, const corner *c, const char *folder, const fsdp_state *named, const fsdp_state *plain)
{
    char path[600];
    for (int head_first = 0; head_first < 2; head_first++) {
        snprintf(path, sizeof(path), "%s/step-%08d", folder, 1);
        for (int how = 0; how < 3; how++) {
            FSDP_TRY(load_into(world, c, head_first, (registering)how, path, NULL, named));
            FSDP_TRY(load_into(world, c, head_first, (registering)how, NULL, named, named));
        }
        snprintf(path, sizeof(path), "%s/step-%08d", folder, 2);
        FSDP_TRY(load_into(world, c, head_first, WITH_SECOND_NAMES, path, NULL, named));
        FSDP_TRY(load_into(world, c, head_first, WITH_SECOND_NAMES, NULL, plain, named));
    }
    return FSDP_OK;
}

static const char *folder_of(int which)
{
    static _Thread_local char path[600];
    snprintf(path, sizeof(path), "%s/corner-%d", scratch_dir, which);
    return path;
}

static int corners_done;

static fsdp_status save_and_load(fsdp_comm *world, void *arg)
{
    const corner *c = arg;
    net n;
    fsdp_state *named, *plain;
    fsdp_checkpoint *without;
    FSDP_TRY(open_net(&n, world, c, false, WITH_SECOND_NAMES));
    FSDP_TRY(register_all(&n, FIRST_ALONE, &without));
    FSDP_TRY(train(&n));
    FSDP_TRY(fsdp_checkpoint_save(n.c, folder_of(corners_done), 1, 0));
    FSDP_TRY(fsdp_checkpoint_save(without, folder_of(corners_done), 2, 0));
    FSDP_TRY(fsdp_state_read(&named, n.c, NULL));
    FSDP_TRY(fsdp_state_read(&plain, without, NULL));
    fsdp_checkpoint_destroy(without);
    close_net(&n);
    rank_check(fsdp_state_find(named, "net.head.weight") == fsdp_state_find(named, "net.table.weight"));
    rank_check(fsdp_state_find(plain, "net.head.weight") == NULL);
    FSDP_TRY(load_everywhere(world, c, folder_of(corners_done), named, plain));
    if (corners_done > 0) FSDP_TRY(load_everywhere(world, c, folder_of(0), named, plain)); /* saved by other ranks: training has the same bits */
    fsdp_state_destroy(named);
    fsdp_state_destroy(plain);
    return FSDP_OK;
}

static void count_corner(const corner *c)
{
    (void)c;
    corners_done++;
}

static void test_either_name(void **state)
{
    (void)state;
    static const int few[] = { 2, 3, 0 }, many[] = { 1, 2, 3, 5, 0 };
    corners_done = 0;
    in_corners(save_and_load, &(corners){ .ranks = SANITIZED ? few : many, .processes_only = CAN_FORK, .after = count_corner });
    in_corners(save_and_load, &(corners){ .ranks = (const int[]){ 3, 0 }, .all_modes = true, .threads_only = true, .after = count_corner });
    assert_true(corners_done > 8);
}

/* ---- what a reader, and a dictionary that is changed, say of them ---- */

/* Another text, as long, for what comes last of its kind in the manifest: among the second names. With a checksum that fits. */
static void change_manifest(const char *folder, const char *from, const char *to)
{
    static const char mark[] = ",\n \"checksum\": \"";
    static char text[1 << 16];
    char path[800], sum[20], *at = NULL;
    snprintf(path, sizeof(path), "%s/manifest.json", folder);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    text[fread(text, 1, sizeof(text) - 1, f)] = '\0';
    for (char *p = text; (p = strstr(p, from)) != NULL; p++) at = p;
    char *end = strstr(text, mark);
    assert_true(at != NULL && end != NULL && strlen(from) == strlen(to));
    memcpy(at, to, strlen(to));
    snprintf(sum, sizeof(sum), "%016llx", (unsigned long long)XXH3_64bits(text, (size_t)(end - text)));
    memcpy(end + sizeof(mark) - 1, sum, 16);
    rewind(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

static void test_listed(void **state)
{
    (void)state;
    static const char *const prefix[] = { "ema.", "", "optim.exp_avg.", "optim.exp_avg_sq.", "optim.steps." }; /* in the order of names */
    fsdp_comm *comm;
    net n;
    fsdp_checkpoint_reader *r;
    fsdp_state *s;
    int64_t steps;
    int renamed;
    assert_ok(fsdp_comm_create_self(&comm));
    assert_ok(open_net(&n, comm, &(corner){ .device = "cpu" }, false, WITH_SECOND_NAMES));
    assert_ok(train(&n));
    assert_ok(fsdp_checkpoint_save(n.c, folder_of(1000), 1, 0));
    char path[700];
    snprintf(path, sizeof(path), "%s/step-00000001", folder_of(1000));
    assert_ok(fsdp_checkpoint_reader_open(&r, path));
    assert_int_equal(fsdp_checkpoint_reader_count(r), 16);
    assert_int_equal(fsdp_checkpoint_reader_aliases(r), 5);
    assert_null(fsdp_checkpoint_reader_alias(r, 5));
    assert_null(fsdp_checkpoint_reader_alias(r, -1));
    for (int i = 0; i < 5; i++) {
        char name[100], of[100];
        snprintf(name, sizeof(name), "%snet.head.weight", prefix[i]);
        snprintf(of, sizeof(of), "%snet.table.weight", prefix[i]);
        assert_string_equal(fsdp_checkpoint_reader_alias(r, i)->name, name);
        assert_string_equal(fsdp_checkpoint_reader_alias(r, i)->of, of);
        if (i < 4) assert_ptr_equal(fsdp_checkpoint_reader_find(r, name), fsdp_checkpoint_reader_find(r, of));
    }
    assert_non_null(fsdp_checkpoint_reader_find(r, "net.head.weight"));
    assert_ok(fsdp_checkpoint_reader_i64(r, "optim.steps.net.head.weight", &steps));
    assert_int_equal(steps, STEPS);
    fsdp_checkpoint_reader_close(r);
    /* what is a name of nothing: of no entry and no number, and of no text at all */
    change_manifest(path, "\"net.table.weight\"", "\"net.tabel.weight\"");
    assert_fails(fsdp_checkpoint_reader_open(&r, path), FSDP_ERR_FORMAT, "\"net.head.weight\" is another name of nothing");
    change_manifest(path, "\"net.tabel.weight\"", "[1, 2, 3, 4, 5, 6]");
    assert_fails(fsdp_checkpoint_reader_open(&r, path), FSDP_ERR_FORMAT, "\"net.head.weight\" is another name of nothing");
    /* in a dictionary they follow what they are names of */
    assert_ok(fsdp_state_read(&s, n.c, &(fsdp_state_opts){ .which = FSDP_STATE_PARAMS }));
    assert_non_null(fsdp_state_find(s, "net.head.weight"));
    assert_null(fsdp_state_find(s, "ema.net.head.weight"));
    assert_fails(fsdp_state_i64(s, "optim.steps.net.head.weight", &steps), FSDP_ERR_INVALID, "no integer");
    fsdp_state_destroy(s);
    assert_ok(fsdp_state_read(&s, n.c, NULL));
    assert_ok(fsdp_state_rename(s, "net.table.weight", "net.wte", &renamed));
    assert_int_equal(fsdp_state_remove(s, "net.body.bias"), 1);
    assert_ptr_equal(fsdp_state_find(s, "optim.exp_avg.net.head.weight"), fsdp_state_find(s, "optim.exp_avg.net.wte"));
    assert_ok(fsdp_state_i64(s, "optim.steps.net.head.weight", &steps));
    assert_int_equal(steps, STEPS);
    assert_fails(fsdp_state_add_i64(s, "optim.steps.net.head.weight", 1), FSDP_ERR_INVALID, "already");
    assert_int_equal(fsdp_state_remove(s, "optim.steps.net.wte"), 1);
    assert_fails(fsdp_state_i64(s, "optim.steps.net.head.weight", &steps), FSDP_ERR_INVALID, "no integer");
    fsdp_state_destroy(s);
    close_net(&n);
    fsdp_comm_destroy(comm);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_either_name), cmocka_unit_test(test_listed) };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
