/* A disk that fails or a process that is killed at a chosen step of what is written in a folder; for LD_PRELOAD.

   Steps are calls that change files: each creation, write, sync, truncation, rename and removal counts one, and so
   does a sync of the folder itself, by the name ".". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NONE, EIO_ONCE, FULL_FROM, READ_ONLY_FROM, SHORT, KILL_BEFORE, KILL_AFTER };

static char folder[PATH_MAX];
static int count, chosen, kind, log_file = -1;

void arm_steps(const char *where, int at, int fault, const char *log) {
    count = 0;
    chosen = at;
    kind = fault;
    log_file = syscall(SYS_openat, AT_FDCWD, log, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    strncpy(folder, where, sizeof folder - 1);
}

static void die(void) { syscall(SYS_kill, syscall(SYS_getpid), SIGKILL); }

/* The fault of this step, or NONE; errno is set for a step that fails. */
static int step(const char *name, const char *path) {
    char line[PATH_MAX + 64];
    size_t own = strlen(folder) - 1; /* without its last slash */
    if (log_file < 0 || strncmp(path, folder, own) != 0 || (path[own] && path[own] != '/')) return NONE;
    count++;
    int length = snprintf(line, sizeof line, "%s %s\n", name, path[own] ? path + own + 1 : ".");
    syscall(SYS_write, log_file, line, length);
    if (count < chosen || chosen == 0) return NONE;
    if (kind == FULL_FROM && (!strcmp(name, "unlink") || !strcmp(name, "rename"))) return NONE;
    if (kind == FULL_FROM) { errno = ENOSPC; return kind; }
    if (kind == READ_ONLY_FROM) { errno = EROFS; return kind; }
    if (count > chosen) return NONE;
    if (kind == KILL_BEFORE) die();
    errno = EIO;
    return kind;
}

static int step_of_file(const char *name, int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return NONE;
    path[length] = 0;
    return step(name, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAILS(fault) ((fault) == EIO_ONCE || (fault) == FULL_FROM || (fault) == READ_ONLY_FROM)
#define DONE(fault, result) do { if ((fault) == KILL_AFTER) die(); return result; } while (0)

#define WRITER(name, parameters, arguments, ...) \
    ssize_t name parameters { \
        int before = errno, fault = step_of_file("write", file); \
        if (FAILS(fault)) return -1; \
        errno = before; \
        if (fault == SHORT && size > 1) size /= 2; \
        ssize_t result = REAL(name) arguments; \
        DONE(fault, result); \
    }
WRITER(write, (int file, const void *data, size_t size), (file, data, size))
WRITER(pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
WRITER(pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))

#define SIMPLE(name, title, counted, parameters, arguments) \
    int name parameters { \
        int before = errno, fault = counted; \
        if (FAILS(fault)) return -1; \
        errno = before; \
        int result = REAL(name) arguments; \
        DONE(fault, result); \
    }
SIMPLE(fsync, "sync", step_of_file("sync", file), (int file), (file))
SIMPLE(fdatasync, "sync", step_of_file("sync", file), (int file), (file))
SIMPLE(ftruncate, "truncate", step_of_file("truncate", file), (int file, off_t size), (file, size))
SIMPLE(ftruncate64, "truncate", step_of_file("truncate", file), (int file, off64_t size), (file, size))
SIMPLE(unlink, "unlink", access(path, F_OK) ? NONE : step("unlink", path), (const char *path), (path))
SIMPLE(rename, "rename", step("rename", to), (const char *from, const char *to), (from, to))

#define OPENER(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        int mode = flags & O_CREAT ? va_arg(more, int) : 0; \
        va_end(more); \
        int before = errno, fault = flags & O_CREAT && access(path, F_OK) ? step("create", path) : NONE; \
        if (FAILS(fault)) return -1; \
        errno = before; \
        int result = REAL(name)(path, flags, mode); \
        DONE(fault, result); \
    }
OPENER(open)
OPENER(open64)
