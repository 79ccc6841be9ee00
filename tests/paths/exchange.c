/* As user argv[1], exchange the paths of each pair argv[2],argv[3], ... as fast as possible, until killed. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    uid_t uid = (uid_t)atol(argv[1]);
    if (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))
        return 1;
    puts("ready");
    fflush(stdout);
    for (;;) {
        for (int i = 2; i + 1 < argc; i += 2)
            syscall(SYS_renameat2, AT_FDCWD, argv[i], AT_FDCWD, argv[i + 1], 2 /* RENAME_EXCHANGE */);
        if (getppid() == 1)
            return 0; /* the test is gone */
    }
}
