/* Executes a program as systemd executes a service with
 *
 *   MemoryDenyWriteExecute=true   SystemCallArchitectures=native   NoNewPrivileges=true   RestrictNamespaces=true
 *   SystemCallFilter=@system-service   SystemCallFilter=~@privileged @resources
 *
 * as Debian's unit of redis has it: a system call that is not listed kills the process; memory that is made executable
 * is refused.
 *
 *   sandbox [--kernel-mdwe | --filter-mdwe] [--no-membarrier] PROGRAM ARGUMENTS...
 *   sandbox --missing NUMBER PROGRAM ARGUMENTS...    (nothing else: a kernel that lacks this system call)
 *
 *   --kernel-mdwe   PR_SET_MDWE (systemd 254 and later)
 *   --filter-mdwe   by seccomp (systemd 252, Debian 12): mmap with write and exec, mprotect with exec, shmat with exec
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#define PR_MDWE_REFUSE_EXEC_GAIN 1
#endif

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
/* Goes on when equal, skips `n` instructions otherwise. */
#define IF_EQUAL(value, n) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, n)
#define RETURN(value) BPF_STMT(BPF_RET | BPF_K, value)
/* `field` holds all bits of `mask`: refused. */
#define REFUSE_BITS(nr_, field, mask) \
    LOAD(nr), IF_EQUAL(nr_, 4), LOAD(field), BPF_STMT(BPF_ALU | BPF_AND | BPF_K, mask), IF_EQUAL(mask, 1), \
        RETURN(SECCOMP_RET_ERRNO | EPERM)
#define N(name) SYS_##name,

/* @system-service and @default without @privileged and @resources. */
static const unsigned allowed[] = {
    N(accept) N(accept4) N(access) N(add_key) N(alarm) N(arch_prctl) N(bind) N(brk) N(capget) N(chdir) N(chmod)
    N(clock_getres) N(clock_gettime) N(clock_nanosleep) N(clone) N(clone3) N(close) N(close_range) N(connect)
    N(copy_file_range) N(creat) N(dup) N(dup2) N(dup3) N(epoll_create) N(epoll_create1) N(epoll_ctl)
    N(epoll_ctl_old) N(epoll_pwait) N(epoll_pwait2) N(epoll_wait) N(epoll_wait_old) N(eventfd) N(eventfd2) N(execve)
    N(execveat) N(exit) N(exit_group) N(faccessat) N(faccessat2) N(fadvise64) N(fallocate) N(fchdir) N(fchmod)
    N(fchmodat) N(fcntl) N(fdatasync) N(fgetxattr) N(flistxattr) N(flock) N(fork) N(fremovexattr) N(fsetxattr)
    N(fstat) N(fstatfs) N(fsync) N(ftruncate) N(futex) N(futex_waitv) N(futimesat) N(get_mempolicy)
    N(get_robust_list) N(get_thread_area) N(getcpu) N(getcwd) N(getdents) N(getdents64) N(getegid) N(geteuid)
    N(getgid) N(getgroups) N(getitimer) N(getpeername) N(getpgid) N(getpgrp) N(getpid) N(getppid) N(getpriority)
    N(getrandom) N(getresgid) N(getresuid) N(getrlimit) N(getrusage) N(getsid) N(getsockname) N(getsockopt)
    N(gettid) N(gettimeofday) N(getuid) N(getxattr) N(inotify_add_watch) N(inotify_init) N(inotify_init1)
    N(inotify_rm_watch) N(io_cancel) N(io_destroy) N(io_getevents) N(io_pgetevents) N(io_setup) N(io_submit)
    N(io_uring_enter) N(io_uring_register) N(io_uring_setup) N(ioctl) N(ioprio_get) N(kcmp) N(keyctl) N(kill)
    N(lgetxattr) N(link) N(linkat) N(listen) N(listxattr) N(llistxattr) N(lremovexattr) N(lseek) N(lsetxattr)
    N(lstat) N(madvise) N(membarrier) N(memfd_create) N(mkdir) N(mkdirat) N(mknod) N(mknodat) N(mlock) N(mlock2)
    N(mlockall) N(mmap) N(mprotect) N(mq_getsetattr) N(mq_notify) N(mq_open) N(mq_timedreceive) N(mq_timedsend)
    N(mq_unlink) N(mremap) N(msgctl) N(msgget) N(msgrcv) N(msgsnd) N(msync) N(munlock) N(munlockall) N(munmap)
    N(name_to_handle_at) N(nanosleep) N(newfstatat) N(open) N(openat) N(openat2) N(pause) N(personality)
    N(pidfd_open) N(pidfd_send_signal) N(pipe) N(pipe2) N(poll) N(ppoll) N(prctl) N(pread64) N(preadv) N(preadv2)
    N(prlimit64) N(process_madvise) N(process_vm_readv) N(process_vm_writev) N(pselect6) N(pwrite64) N(pwritev)
    N(pwritev2) N(read) N(readahead) N(readlink) N(readlinkat) N(readv) N(recvfrom) N(recvmmsg) N(recvmsg)
    N(remap_file_pages) N(removexattr) N(rename) N(renameat) N(renameat2) N(request_key) N(restart_syscall) N(rmdir)
    N(rseq) N(rt_sigaction) N(rt_sigpending) N(rt_sigprocmask) N(rt_sigqueueinfo) N(rt_sigreturn) N(rt_sigsuspend)
    N(rt_sigtimedwait) N(rt_tgsigqueueinfo) N(sched_get_priority_max) N(sched_get_priority_min) N(sched_getaffinity)
    N(sched_getattr) N(sched_getparam) N(sched_getscheduler) N(sched_rr_get_interval) N(sched_yield) N(select)
    N(semctl) N(semget) N(semop) N(semtimedop) N(sendfile) N(sendmmsg) N(sendmsg) N(sendto) N(set_robust_list)
    N(set_thread_area) N(set_tid_address) N(setfsgid) N(setgid) N(setitimer) N(setns) N(setpgid) N(setregid)
    N(setresgid) N(setsid) N(setsockopt) N(setxattr) N(shmat) N(shmctl) N(shmdt) N(shmget) N(shutdown)
    N(sigaltstack) N(signalfd) N(signalfd4) N(socket) N(socketpair) N(splice) N(stat) N(statfs) N(statx) N(symlink)
    N(symlinkat) N(sync) N(sync_file_range) N(syncfs) N(sysinfo) N(tee) N(tgkill) N(time) N(timer_create)
    N(timer_delete) N(timer_getoverrun) N(timer_gettime) N(timer_settime) N(timerfd_create) N(timerfd_gettime)
    N(timerfd_settime) N(times) N(tkill) N(truncate) N(umask) N(uname) N(unlink) N(unlinkat) N(unshare)
    N(userfaultfd) N(utime) N(utimensat) N(utimes) N(vfork) N(vmsplice) N(wait4) N(waitid) N(write) N(writev)
};

static int install(struct sock_filter *code, size_t count) {
    struct sock_fprog program = {.len = (unsigned short)count, .filter = code};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

static int allow_list(int membarrier) {
    struct sock_filter code[2 * sizeof allowed / sizeof *allowed + 8];
    size_t n = 0;
    code[n++] = (struct sock_filter)LOAD(arch);
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
    code[n++] = (struct sock_filter)RETURN(SECCOMP_RET_KILL_PROCESS);
    code[n++] = (struct sock_filter)LOAD(nr);
    for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++) {
        if (allowed[i] == SYS_membarrier && !membarrier) continue;
        code[n++] = (struct sock_filter)IF_EQUAL(allowed[i], 1);
        code[n++] = (struct sock_filter)RETURN(SECCOMP_RET_ALLOW);
    }
    code[n++] = (struct sock_filter)RETURN(SECCOMP_RET_KILL_PROCESS);
    return install(code, n);
}

static int filter_mdwe(void) {
    struct sock_filter code[] = {
        REFUSE_BITS(SYS_mmap, args[2], PROT_WRITE | PROT_EXEC), REFUSE_BITS(SYS_mprotect, args[2], PROT_EXEC),
        REFUSE_BITS(SYS_pkey_mprotect, args[2], PROT_EXEC),     REFUSE_BITS(SYS_shmat, args[2], SHM_EXEC),
        RETURN(SECCOMP_RET_ALLOW),
    };
    return install(code, sizeof code / sizeof *code);
}

static int restrict_namespaces(void) {
    struct sock_filter code[] = {LOAD(nr), IF_EQUAL(SYS_unshare, 1), RETURN(SECCOMP_RET_ERRNO | EPERM),
                                 RETURN(SECCOMP_RET_ALLOW)};
    return install(code, sizeof code / sizeof *code);
}

static int missing(unsigned nr) {
    struct sock_filter code[] = {LOAD(nr), IF_EQUAL(nr, 1), RETURN(SECCOMP_RET_ERRNO | ENOSYS), RETURN(SECCOMP_RET_ALLOW)};
    return install(code, sizeof code / sizeof *code);
}

int main(int argc, char **argv) {
    if (argc > 3 && !strcmp(argv[1], "--missing")) {
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || missing((unsigned)atoi(argv[2]))) return perror("seccomp"), 3;
        execvp(argv[3], argv + 3);
        return perror(argv[3]), 3;
    }
    int kernel = 0, filter = 0, membarrier = 1, i = 1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        if (!strcmp(argv[i], "--kernel-mdwe")) kernel = 1;
        else if (!strcmp(argv[i], "--filter-mdwe")) filter = 1;
        else if (!strcmp(argv[i], "--no-membarrier")) membarrier = 0;
        else return 2;
    }
    if (i == argc) return 2;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return perror("PR_SET_NO_NEW_PRIVS"), 3;
    if (kernel && prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0)) return perror("PR_SET_MDWE"), 3;
    if (filter && filter_mdwe()) return perror("seccomp: write and execute"), 3;
    if (restrict_namespaces()) return perror("seccomp: namespaces"), 3;
    if (allow_list(membarrier)) return perror("seccomp: allow list"), 3;
    execvp(argv[i], argv + i);
    return perror(argv[i]), 3;
}
