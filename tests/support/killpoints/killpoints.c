/* Counts the calls by which a process changes something outside of itself, and ends it by SIGKILL before or after one of
 * them. Loaded by LD_PRELOAD; the control file (KILLPOINTS) says which processes, which calls, and where. What is not a
 * role runs as if this library was not there, and does not pass it on. See __init__.py. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define MOST 16
#define TEXT 4096

struct role { char name[32]; char command[256]; };
static struct role roles[MOST];
static char below[MOST][512], aside[MOST][128];
static int n_roles, n_below, n_aside;
static char calls[1024], trace[512], fired[512], control[512], library[512];
/* The point of the kill: the n-th call of this role, name and path (patterns); n 0: none. */
static char kill_role[32], kill_call[64] = "*", kill_path[512] = "*";
static int kill_at, kill_after;
static struct role *mine;
static long my_pid;
struct numbers { int counted[MOST]; int matched; };
static struct numbers *numbers; /* shared by all processes */

static long (*real_syscall)(long, ...);
#define REAL(name) ((__typeof__(name) *)real(#name, &real_##name))
static void *real(const char *name, void **known)
{
    if (!*known)
        *known = dlsym(RTLD_NEXT, name);
    return *known;
}

static void read_line(char *line)
{
    char word[16] = "", rest[1024] = "";
    if (sscanf(line, "%15s %1023[^\n]", word, rest) < 2)
        return;
    if (!strcmp(word, "role") && n_roles < MOST)
        sscanf(rest, "%31s %255[^\n]", roles[n_roles].name, roles[n_roles].command), n_roles++;
    else if (!strcmp(word, "below") && n_below < MOST)
        snprintf(below[n_below++], sizeof below[0], "%s", rest);
    else if (!strcmp(word, "aside") && n_aside < MOST)
        snprintf(aside[n_aside++], sizeof aside[0], "%s", rest);
    else if (!strcmp(word, "calls"))
        snprintf(calls, sizeof calls, " %s ", rest);
    else if (!strcmp(word, "trace"))
        snprintf(trace, sizeof trace, "%s", rest);
    else if (!strcmp(word, "fired"))
        snprintf(fired, sizeof fired, "%s", rest);
    else if (!strcmp(word, "kill")) {
        char when[8];
        if (sscanf(rest, "%31s %d %7s %63s %511[^\n]", kill_role, &kill_at, when, kill_call, kill_path) == 5)
            kill_after = !strcmp(when, "after");
    } else if (!strcmp(word, "numbers")) {
        int fd = open(rest, O_RDWR | O_CLOEXEC);
        void *shared = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *numbers, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd >= 0)
            close(fd);
        if (shared != MAP_FAILED)
            numbers = shared;
    }
}

static struct role *role_of(const char *command)
{
    for (int i = 0; i < n_roles; i++)
        if (!fnmatch(roles[i].command, command, 0))
            return &roles[i];
    return NULL;
}

__attribute__((constructor)) static void begin(void)
{
    const char *named = getenv("KILLPOINTS"), *loaded = getenv("LD_PRELOAD");
    char line[2048], command[TEXT] = "";
    real_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    FILE *file = named ? fopen(named, "re") : NULL;
    if (!file)
        return;
    snprintf(control, sizeof control, "KILLPOINTS=%s", named);
    snprintf(library, sizeof library, "LD_PRELOAD=%s", loaded ? loaded : "");
    while (fgets(line, sizeof line, file))
        read_line(line);
    fclose(file);
    FILE *own = fopen("/proc/self/cmdline", "re");
    size_t length = own ? fread(command, 1, sizeof command - 1, own) : 0;
    if (own)
        fclose(own);
    for (size_t i = 0; i + 1 < length; i++)
        if (!command[i])
            command[i] = ' ';
    if (numbers)
        mine = role_of(command);
    my_pid = real_syscall(SYS_getpid);
}

/* -- counting ------------------------------------------------------------------------------------------------------ */

static void absolute(int directory, const char *path, char *into)
{
    char link[64];
    if (path && path[0] == '/') {
        snprintf(into, TEXT, "%s", path);
        return;
    }
    if (directory == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, into, TEXT - 1);
    into[length < 0 ? 0 : length] = 0;
    if (path && path[0] && length > 0)
        snprintf(into + length, TEXT - length, "/%s", path);
}

static int wanted(const char *path)
{
    int found = n_below == 0;
    for (int i = 0; i < n_below; i++)
        found |= !strncmp(path, below[i], strlen(below[i]));
    for (int i = 0; i < n_aside; i++)
        if (strstr(path, aside[i]))
            return 0;
    return found;
}

static void end(long pid)
{
    int fd = real_syscall(SYS_openat, AT_FDCWD, fired, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return; /* once is enough: the next podwatch lives */
    char text[32];
    real_syscall(SYS_write, fd, text, (size_t)snprintf(text, sizeof text, "%ld\n", pid));
    real_syscall(SYS_close, fd);
    real_syscall(SYS_kill, pid, SIGKILL);
    while (pid == real_syscall(SYS_getpid))
        pause();
}

static int counts(const char *call)
{
    char word[64];
    snprintf(word, sizeof word, " %s ", call);
    return mine && strstr(calls, word);
}

/* Writes the call down; the pid to kill after it, else 0. */
static long point(const char *call, const char *path)
{
    char line[TEXT + 128];
    if (!counts(call))
        return 0;
    int saved = errno;
    long pid = real_syscall(SYS_getpid), victim = pid;
    if (!strncmp(call, "exec", 4) && pid != my_pid && real_syscall(SYS_getppid) == my_pid)
        victim = my_pid; /* a child that is to become another program: its parent dies */
    int number = __atomic_add_fetch(&numbers->counted[mine - roles], 1, __ATOMIC_SEQ_CST);
    int length = snprintf(line, sizeof line, "%ld %s %d %s %s\n", pid, mine->name, number, call, path);
    for (int i = 0; i < length - 1 && i < (int)sizeof line - 2; i++)
        if (line[i] == '\n')
            line[i] = ' ';
    if (length >= (int)sizeof line)
        line[sizeof line - 2] = '\n';
    int fd = real_syscall(SYS_openat, AT_FDCWD, trace, O_WRONLY | O_APPEND | O_CLOEXEC, 0);
    if (fd >= 0) {
        real_syscall(SYS_write, fd, line, length < (int)sizeof line ? length : (int)sizeof line - 1);
        real_syscall(SYS_close, fd);
    }
    long after = 0;
    if (kill_at && !strcmp(kill_role, mine->name) && !fnmatch(kill_call, call, 0) && !fnmatch(kill_path, path, 0)
        && __atomic_add_fetch(&numbers->matched, 1, __ATOMIC_SEQ_CST) == kill_at) {
        if (kill_after)
            after = victim;
        else
            end(victim);
    }
    errno = saved;
    return after;
}

static void done(long victim)
{
    if (victim)
        end(victim);
}

static long at_path(const char *call, int directory, const char *path)
{
    char whole[TEXT];
    if (!counts(call))
        return 0;
    int saved = errno;
    absolute(directory, path, whole);
    errno = saved;
    return wanted(whole) ? point(call, whole) : 0;
}

/* -- files --------------------------------------------------------------------------------------------------------- */

#define WRAP(type, name, given, passed, call, directory, path)                                                        \
    static void *real_##name;                                                                                          \
    type name given                                                                                                    \
    {                                                                                                                  \
        long after = at_path(call, directory, path);                                                                   \
        type result = REAL(name) passed;                                                                               \
        done(after);                                                                                                   \
        return result;                                                                                                 \
    }

WRAP(int, rename, (const char *a, const char *b), (a, b), "rename", AT_FDCWD, b)
WRAP(int, renameat, (int d, const char *a, int e, const char *b), (d, a, e, b), "rename", e, b)
WRAP(int, renameat2, (int d, const char *a, int e, const char *b, unsigned f), (d, a, e, b, f), "rename", e, b)
WRAP(int, unlink, (const char *a), (a), "unlink", AT_FDCWD, a)
WRAP(int, unlinkat, (int d, const char *a, int f), (d, a, f), "unlink", d, a)
WRAP(int, rmdir, (const char *a), (a), "unlink", AT_FDCWD, a)
WRAP(int, link, (const char *a, const char *b), (a, b), "link", AT_FDCWD, b)
WRAP(int, linkat, (int d, const char *a, int e, const char *b, int f), (d, a, e, b, f), "link", e, b)
WRAP(int, symlink, (const char *a, const char *b), (a, b), "link", AT_FDCWD, b)
WRAP(int, symlinkat, (const char *a, int e, const char *b), (a, e, b), "link", e, b)
WRAP(int, mkdir, (const char *a, mode_t m), (a, m), "mkdir", AT_FDCWD, a)
WRAP(int, mkdirat, (int d, const char *a, mode_t m), (d, a, m), "mkdir", d, a)
WRAP(int, fsync, (int d), (d), "fsync", d, "")
WRAP(int, fdatasync, (int d), (d), "fsync", d, "")
WRAP(int, ftruncate, (int d, off_t n), (d, n), "truncate", d, "")
WRAP(int, ftruncate64, (int d, off64_t n), (d, n), "truncate", d, "")
WRAP(ssize_t, write, (int d, const void *b, size_t n), (d, b, n), "write", d, "")
WRAP(ssize_t, pwrite, (int d, const void *b, size_t n, off_t o), (d, b, n, o), "write", d, "")
WRAP(ssize_t, pwrite64, (int d, const void *b, size_t n, off64_t o), (d, b, n, o), "write", d, "")

#define CHANGES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)
#define WRAP_OPEN(name, given, passed, directory)                                                                      \
    static void *real_##name;                                                                                          \
    int name given                                                                                                     \
    {                                                                                                                  \
        mode_t mode = 0;                                                                                               \
        if (flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) {                                                          \
            va_list more;                                                                                              \
            va_start(more, flags);                                                                                     \
            mode = va_arg(more, mode_t);                                                                               \
            va_end(more);                                                                                              \
        }                                                                                                              \
        long after = flags & CHANGES ? at_path("open", directory, path) : 0;                                   \
        int result = REAL(name) passed;                                                                                \
        done(after);                                                                                                   \
        return result;                                                                                                 \
    }

WRAP_OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
WRAP_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
WRAP_OPEN(openat, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), fd)
WRAP_OPEN(openat64, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), fd)

/* -- others -------------------------------------------------------------------------------------------------------- */

static void *real_connect;
int connect(int fd, const struct sockaddr *to, socklen_t size)
{
    char where[160] = "other", text[INET6_ADDRSTRLEN] = "";
    if (mine && to->sa_family == AF_UNIX)
        snprintf(where, sizeof where, "%s", ((const struct sockaddr_un *)to)->sun_path);
    else if (mine && to->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const void *)to;
        inet_ntop(AF_INET, &in->sin_addr, text, sizeof text);
        snprintf(where, sizeof where, "%s:%d", text, ntohs(in->sin_port));
    }
    long after = point("connect", where);
    int result = REAL(connect)(fd, to, size);
    done(after);
    return result;
}

/* An HTTP request without TLS: its line, and the name of the object that B2 has in a header. */
static void request(const char *data, size_t size, char *into)
{
    static const char *const methods[] = {"GET ", "HEAD ", "POST ", "PUT ", "DELETE "};
    static const char header[] = "\r\nX-Bz-File-Name: ";
    into[0] = 0;
    for (int i = 0; i < 5; i++) {
        const char *end = memmem(data, size, " HTTP/1.1\r\n", 11);
        if (!end || strncmp(data, methods[i], strlen(methods[i])))
            continue; /* a body, TLS, an answer */
        int length = snprintf(into, TEXT, "%.*s", (int)(end - data), data);
        const char *name = memmem(data, size, header, sizeof header - 1);
        if (name && length < TEXT) {
            name += sizeof header - 1;
            const char *stop = memchr(name, '\r', size - (name - data));
            if (stop)
                snprintf(into + length, TEXT - length, " %.*s", (int)(stop - name), name);
        }
    }
}

static void *real_send;
ssize_t send(int fd, const void *data, size_t size, int flags)
{
    char text[TEXT] = "";
    if (counts("request") && size > 16)
        request(data, size, text);
    long after = text[0] ? point("request", text) : 0;
    ssize_t result = REAL(send)(fd, data, size, flags);
    done(after);
    return result;
}

static long at_signal(const char *call, long whom, int number)
{
    char text[64];
    snprintf(text, sizeof text, "%ld/%d", whom, number);
    return number ? point(call, text) : 0;
}

static void *real_kill, *real_killpg;
int kill(pid_t pid, int number)
{
    long after = at_signal("kill", pid, number);
    int result = REAL(kill)(pid, number);
    done(after);
    return result;
}

int killpg(pid_t group, int number)
{
    long after = at_signal("kill", -(long)group, number);
    int result = REAL(killpg)(group, number);
    done(after);
    return result;
}

long syscall(long number, ...)
{
    va_list more;
    long a[6], after = 0;
    va_start(more, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(more, long);
    va_end(more);
    if (!real_syscall)
        real_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_pidfd_send_signal)
        after = at_signal("kill", a[0], (int)a[1]); /* a descriptor, not a pid */
    long result = real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    done(after);
    return result;
}

static void *real_fork;
pid_t fork(void)
{
    long after = point("fork", "-");
    pid_t result = REAL(fork)();
    if (result)
        done(after);
    return result;
}

/* -- exec: only a role gets the library, whatever environment its parent gives it ------------------------------------ */

static int ours(const char *pair)
{
    return !strncmp(pair, "KILLPOINTS=", 11) || !strncmp(pair, "LD_PRELOAD=", 11);
}

static size_t size_of(char *const list[])
{
    size_t n = 0;
    while (list && list[n])
        n++;
    return n;
}

static void environment_for(char *const argv[], char *const given[], char **made, char *command)
{
    size_t length = 0, n = 0;
    for (size_t i = 0; argv && argv[i] && length < TEXT - 1; i++)
        length += snprintf(command + length, TEXT - length, i ? " %s" : "%s", argv[i]);
    for (size_t i = 0; given && given[i]; i++)
        if (!ours(given[i]))
            made[n++] = given[i];
    if (role_of(command)) {
        made[n++] = control;
        made[n++] = library;
    }
    made[n] = NULL;
}

static void *real_execve, *real_posix_spawn, *real_posix_spawnp;
int execve(const char *path, char *const argv[], char *const envp[])
{
    if (!control[0])
        return REAL(execve)(path, argv, envp);
    char *made[size_of(envp) + 3], command[TEXT] = "";
    environment_for(argv, envp, made, command);
    if (access(path, X_OK) == 0) /* Python tries each directory of PATH */
        point("exec", command);  /* there is no "after" here: the new program counts for itself */
    return REAL(execve)(path, argv, made);
}

int execv(const char *path, char *const argv[])
{
    return execve(path, argv, environ);
}

int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how,
                char *const argv[], char *const envp[])
{
    char *made[size_of(envp) + 3], command[TEXT] = "";
    environment_for(argv, envp, made, command);
    long after = point("exec", command);
    int result = REAL(posix_spawn)(pid, path, actions, how, argv, control[0] ? made : envp);
    done(after);
    return result;
}

int posix_spawnp(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how,
                 char *const argv[], char *const envp[])
{
    char *made[size_of(envp) + 3], command[TEXT] = "";
    environment_for(argv, envp, made, command);
    long after = point("exec", command);
    int result = REAL(posix_spawnp)(pid, path, actions, how, argv, control[0] ? made : envp);
    done(after);
    return result;
}
