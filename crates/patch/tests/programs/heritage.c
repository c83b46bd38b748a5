/* Tells what it was given by whoever started it: a test compares that with and without `stillpoint patch exec`.
 *
 *   heritage                 tells, and exits with the version of the patched function
 *   heritage --daemon FILE   forks twice; the daemon writes the version into FILE and stays for a minute
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define VERSION 1

extern char **environ;
extern void _start(void);

__attribute__((noipa)) int answer(void) { return VERSION; }

/* What runs first of the program itself: the patch must be in force already. */
static int at_start;
__attribute__((constructor)) static void first(void) { at_start = answer(); }

static void descriptors(void) {
    for (int fd = 0; fd < 2048; fd++) {
        int flags = fcntl(fd, F_GETFD), status = fcntl(fd, F_GETFL);
        if (flags >= 0) printf("descriptor %d: %d %#o\n", fd, flags, (unsigned)status);
    }
}

static void status(void) {
    static const char *wanted[] = {"Umask", "TracerPid", "Uid",    "Gid",    "Groups", "Threads", "SigPnd", "ShdPnd",
                                   "SigBlk", "SigIgn",   "SigCgt", "CapInh", "CapPrm", "CapEff",  "CapBnd", "CapAmb",
                                   "NoNewPrivs", "Seccomp", "Cpus_allowed_list"};
    char line[512];
    FILE *file = fopen("/proc/self/status", "re");
    while (file && fgets(line, sizeof line, file))
        for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
            if (!strncmp(line, wanted[i], strlen(wanted[i])) && line[strlen(wanted[i])] == ':') fputs(line, stdout);
    if (file) fclose(file);
}

static void copy(const char *path) {
    char text[4096];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text);
    if (got > 0) printf("%s: %.*s\n", path, (int)got, text);
    if (fd >= 0) close(fd);
}

static int daemonize(const char *path) {
    if (fork()) _exit(0);
    setsid();
    if (fork()) _exit(0);
    alarm(60);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; fd < 3; fd++) dup2(null, fd);
    FILE *file = fopen(path, "we");
    if (!file) return 1;
    fprintf(file, "%d %d\n", answer(), (int)getpid());
    fclose(file);
    pause();
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[1], "--daemon")) return daemonize(argv[2]);
    for (int i = 0; i < argc; i++) printf("argument %d: %s\n", i, argv[i]);
    for (char **e = environ; *e; e++) printf("environment: %s\n", *e);
    descriptors();
    status();
    copy("/proc/self/cgroup");
    copy("/proc/self/oom_score_adj");
    printf("comm: %s", "");
    copy("/proc/self/comm");
    int nice_ = getpriority(PRIO_PROCESS, 0), death = 0;
    prctl(PR_GET_PDEATHSIG, &death);
    printf("group %d, session %d, nice %d, dies with its parent by %d\n", getpgrp() == getpid(), getsid(0) == getpid(),
           nice_, death);
    for (int i = 0; i < RLIM_NLIMITS; i++) {
        struct rlimit limit;
        if (!getrlimit(i, &limit)) printf("limit %d: %ld %ld\n", i, (long)limit.rlim_cur, (long)limit.rlim_max);
    }
    printf("entry as stated: %d\n", getauxval(AT_ENTRY) == (unsigned long)_start);
    printf("children: %d\n", waitpid(-1, NULL, WNOHANG));
    copy("/proc/thread-self/children");
    fflush(stdout);
    return at_start == answer() ? answer() : 99;
}
