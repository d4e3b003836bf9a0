/* SPDX-License-Identifier: MIT
 *
 * A file that is written atomically is the old one or the new one, never a part; a file that is read is whole
 * or an error; and what goes wrong is said with path and numbers. */
#include "format/scratch.h"

#include "base/alloc.h"
#include "format/fileio.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>

static void test_read_file(void **state)
{
    (void)state;
    char *data;
    size_t n;
    assert_ok(fsdpi_read_file(scratch_write("a", "x\0y", 3), 3, &data, &n));
    assert_true(n == 3 && memcmp(data, "x\0y", 4) == 0);
    fsdpi_free(data);
    assert_ok(fsdpi_read_file(scratch_write("empty", "", 0), 0, &data, &n));
    assert_true(n == 0 && data[0] == '\0');
    fsdpi_free(data);
    assert_fails(fsdpi_read_file(scratch("a"), 2, &data, &n), FSDP_ERR_FORMAT,
                 "3 bytes long, more than the 2");
    assert_fails(fsdpi_read_file(scratch("none"), 9, &data, &n), FSDP_ERR_IO, "/none: there is no such file");
    assert_fails(fsdpi_read_file(scratch_dir, 9, &data, &n), FSDP_ERR_IO, "this is a folder");
    assert_fails(fsdpi_read_file("/dev/zero", 9, &data, &n), FSDP_ERR_IO, "a pipe or a device");
    assert_int_equal(mkfifo(scratch("pipe"), 0600), 0);
    assert_fails(fsdpi_read_file(scratch("pipe"), 9, &data, &n), FSDP_ERR_IO,
                 "a pipe or a device"); /* does not wait */
}

static void test_a_file_that_changes_while_it_is_open(void **state)
{
    (void)state;
    char out[16];
    for (int keep = 0; keep < 2; keep++) {
        fsdpi_file f;
        char *path = scratch_text("c", "0123456789");
        assert_ok(fsdpi_file_open(&f, path, keep));
        assert_ok(fsdpi_file_read(&f, 4, out, 6));
        assert_memory_equal(out, "456789", 6);
        assert_ok(fsdpi_file_read(&f, 10, out, 0));
        assert_fails(fsdpi_file_read(&f, 5, out, 6), FSDP_ERR_INVALID,
                     "6 bytes at byte 5 are asked for, of 10");
        assert_fails(fsdpi_file_read(&f, -1, out, 1), FSDP_ERR_INVALID, "at byte -1");
        assert_int_equal(truncate(path, 7), 0);
        assert_fails(fsdpi_file_read(&f, 4, out, 6), FSDP_ERR_IO,
                     keep ? "was truncated" : "10 bytes then, 7 now");
        assert_int_equal(unlink(path), 0);
        if (!keep) assert_fails(fsdpi_file_read(&f, 4, out, 6), FSDP_ERR_IO, "no such file");
        fsdpi_file_close(&f);
        fsdpi_file_close(&f);
    }
}

static void test_write_file_atomic(void **state)
{
    (void)state;
    char *data;
    size_t n;
    char *path = scratch("w");
    assert_ok(fsdpi_write_file_atomic(path, "one", 3));
    assert_ok(fsdpi_write_file_atomic(path, "three", 5));
    assert_ok(fsdpi_read_file(path, 99, &data, &n));
    assert_string_equal(data, "three");
    fsdpi_free(data);
    assert_ok(fsdpi_write_file_atomic(scratch("w0"), NULL, 0));
    int before = scratch_entries();
    assert_fails(fsdpi_write_file_atomic(scratch("no/such"), "x", 1), FSDP_ERR_IO,
                 "its folder does not exist");
    assert_fails(fsdpi_write_file_atomic(scratch("w/x"), "x", 1), FSDP_ERR_IO, "or is no folder");
    assert_fails(fsdpi_write_file_atomic(scratch_dir, "x", 1), FSDP_ERR_IO, "this is a folder");
    assert_fails(fsdpi_write_file_atomic("/dev/null", "x", 1), FSDP_ERR_IO, "a device or a pipe");
    assert_fails(fsdpi_write_file_atomic("", "x", 1), FSDP_ERR_INVALID, "empty name");
    assert_fails(fsdpi_write_file_atomic(scratch("w/"), "x", 1), FSDP_ERR_INVALID, "names a folder");
    assert_int_equal(scratch_entries(), before); /* no temporary is left */
    assert_ok(fsdpi_write_file_atomic(scratch("w"), "again", 5));
}

/* The old file stays until the commit, and after an abort. */
static void test_temp(void **state)
{
    (void)state;
    char *data, *path = scratch_text("t", "old");
    size_t n;
    fsdpi_temp t;
    int before = scratch_entries();
    for (int commit = 0; commit < 2; commit++) {
        assert_ok(fsdpi_temp_open(&t, path, 6));
        assert_int_equal(scratch_entries(), before + 1);
        assert_ok(fsdpi_temp_write(&t, 3, "new", 3));
        assert_ok(fsdpi_temp_write(&t, 0, "the", 3));
        assert_fails(fsdpi_temp_write(&t, 4, "new", 3), FSDP_ERR_INVALID,
                     "3 bytes at byte 4 are outside its 6");
        assert_ok(fsdpi_read_file(path, 99, &data, &n));
        assert_string_equal(data, "old");
        fsdpi_free(data);
        if (commit) {
            assert_ok(fsdpi_temp_commit(&t));
            assert_fails(fsdpi_temp_write(&t, 0, "x", 1), FSDP_ERR_STATE, "after it was finished");
            assert_fails(fsdpi_temp_commit(&t), FSDP_ERR_STATE, "finished twice");
        }
        fsdpi_temp_close(&t);
        fsdpi_temp_close(&t);
        assert_int_equal(scratch_entries(), before);
        assert_ok(fsdpi_read_file(path, 99, &data, &n));
        assert_string_equal(data, commit ? "thenew" : "old");
        fsdpi_free(data);
    }
    /* a name as long as the system allows */
    char name[256];
    memset(name, 'n', 255);
    name[255] = '\0';
    assert_ok(fsdpi_write_file_atomic(scratch(name), "x", 1));
}

static bool write_on_small_disk(void *arg)
{
    (void)arg;
    static char data[100000];
    char path[128];
    if (mkdir(scratch("disk"), 0700) != 0 || !scratch_mount(scratch("disk"), "size=64k")) _exit(SCRATCH_SKIP);
    snprintf(path, sizeof(path), "%s/disk/f", scratch_dir);
    if (fsdpi_write_file_atomic(path, "good", 4) != FSDP_OK) return false;
    child_expects(fsdpi_write_file_atomic(path, data, sizeof(data)), FSDP_ERR_IO,
                  "the file needs 100000 bytes");
    child_expects(FSDP_ERR_IO, FSDP_ERR_IO, "bytes are free");
    child_expects(FSDP_ERR_IO, FSDP_ERR_IO, path);
    char *old;
    size_t n;
    if (fsdpi_read_file(path, 99, &old, &n) != FSDP_OK || strcmp(old, "good") != 0) return false;
    fsdpi_free(old);
    int names = 0;
    DIR *d = opendir(scratch("disk"));
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) names++;
    return names == 3; /* ".", ".." and "f": no temporary is left */
}

static void test_full_disk(void **state)
{
    (void)state;
    int rc = scratch_fork(write_on_small_disk, NULL);
    if (rc == SCRATCH_SKIP) skip();
    assert_int_equal(rc, 0);
}

static bool write_beyond_limit(void *arg)
{
    (void)arg;
    static char data[100000];
    signal(SIGXFSZ, SIG_DFL); /* would end this process: the call has to refuse before it writes */
    if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 65536, 65536 }) != 0) return false;
    child_expects(fsdpi_write_file_atomic(scratch("big"), data, sizeof(data)), FSDP_ERR_IO,
                  "needs 100000 bytes, and this process may write files of 65536 bytes at most (ulimit -f)");
    return fsdpi_write_file_atomic(scratch("fits"), data, 65536) == FSDP_OK;
}

static void test_file_size_limit(void **state)
{
    (void)state;
    assert_int_equal(scratch_fork(write_beyond_limit, NULL), 0);
}

static bool open_too_many(void *arg)
{
    (void)arg;
    fsdpi_file f;
    if (setrlimit(RLIMIT_NOFILE, &(struct rlimit){ 3, 3 }) != 0) return false;
    child_expects(fsdpi_file_open(&f, "/proc/self/stat", true), FSDP_ERR_IO,
                  "too many files are open (raise the limit: ulimit -n)");
    return true;
}

static void test_too_many_open_files(void **state)
{
    (void)state;
    assert_int_equal(scratch_fork(open_too_many, NULL), 0);
}

static void test_mkdirs(void **state)
{
    (void)state;
    struct stat s;
    assert_ok(fsdpi_mkdirs(scratch("d/e//f/")));
    assert_ok(fsdpi_mkdirs(scratch("d/e/f")));
    assert_true(stat(scratch("d/e/f"), &s) == 0 && S_ISDIR(s.st_mode));
    assert_ok(fsdpi_mkdirs("/"));
    assert_ok(fsdpi_mkdirs("."));
    scratch_text("d/file", "x");
    assert_fails(fsdpi_mkdirs(scratch("d/file")), FSDP_ERR_IO,
                 "d/file: a folder is wanted, and this is a file");
    assert_fails(fsdpi_mkdirs(scratch("d/file/x")), FSDP_ERR_IO,
                 "d/file: a folder is wanted, and this is a file");
    assert_fails(fsdpi_mkdirs("/proc/none/x"), FSDP_ERR_IO, "/proc/none: cannot create this folder");
    assert_fails(fsdpi_mkdirs(""), FSDP_ERR_INVALID, "empty name");
    assert_ok(fsdpi_fsync_dir(scratch("d")));
    assert_fails(fsdpi_fsync_dir(scratch("d/file")), FSDP_ERR_IO, "cannot open this folder");
}

/* Known answers of XXH3 64 bits, seed 0: of nothing, and of a file of several pieces against one call. */
static void test_xxh3(void **state)
{
    (void)state;
    uint64_t hash;
    int64_t bytes;
    assert_ok(fsdpi_file_xxh3(scratch_write("h0", "", 0), &hash, &bytes));
    assert_true(hash == 0x2d06800538d394c2u && bytes == 0);
    static char data[600001];
    for (size_t i = 0; i < sizeof(data); i++) data[i] = (char)(i * 31 >> 3);
    uint64_t a;
    assert_ok(fsdpi_file_xxh3(scratch_write("h1", data, sizeof(data)), &a, NULL));
    data[600000] ^= 1;
    assert_ok(fsdpi_file_xxh3(scratch_write("h1", data, sizeof(data)), &hash, &bytes));
    assert_true(a != hash && bytes == 600001);
    assert_fails(fsdpi_file_xxh3(scratch("none"), &hash, NULL), FSDP_ERR_IO, "no such file");
}

static fsdp_status everything(void)
{
    char *data;
    size_t n;
    uint64_t hash;
    FSDP_TRY(fsdpi_mkdirs(scratch("x/y")));
    FSDP_TRY(fsdpi_write_file_atomic(scratch("x/y/z"), "abc", 3));
    FSDP_TRY(fsdpi_file_xxh3(scratch("x/y/z"), &hash, NULL));
    FSDP_TRY(fsdpi_read_file(scratch("x/y/z"), 10, &data, &n));
    fsdpi_free(data);
    return FSDP_OK;
}

static void test_no_memory(void **state)
{
    (void)state;
    long live = fsdpi_alloc_live();
    fsdp_status st = FSDP_ERR_NOMEM;
    for (long n = 1; st != FSDP_OK; n++) {
        fsdpi_alloc_fail_at(n);
        st = everything();
        fsdpi_alloc_fail_at(0);
        assert_true(st == FSDP_OK || st == FSDP_ERR_NOMEM);
        assert_int_equal(fsdpi_alloc_live(), live);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read_file),
        cmocka_unit_test(test_a_file_that_changes_while_it_is_open),
        cmocka_unit_test(test_write_file_atomic),
        cmocka_unit_test(test_temp),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_file_size_limit),
        cmocka_unit_test(test_too_many_open_files),
        cmocka_unit_test(test_mkdirs),
        cmocka_unit_test(test_xxh3),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
