// Installs seccomp filters: mmap would return EPERM, and (another filter) socket would kill. Then waits in read.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static int refuse(int nr, unsigned action)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, action),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

int main(void)
{
    static char buffer[64];
    setvbuf(stdout, buffer, _IOLBF, sizeof buffer);
    static char input[64];
    setvbuf(stdin, input, _IOLBF, sizeof input);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (refuse(SYS_mmap, SECCOMP_RET_ERRNO | EPERM) != 0 || refuse(SYS_socket, SECCOMP_RET_KILL_PROCESS) != 0)
        return 1;
    printf("ready filters 2\n");
    char line[16];
    while (fgets(line, sizeof line, stdin))
        printf("faults 0\n");
    return 0;
}
