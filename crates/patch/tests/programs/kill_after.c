/* Runs a program and kills it (SIGKILL) right after its Nth system call, all of its threads counted together; or right before
 * the Nth of those that write where they say (pwrite64: into the memory of others), however many calls lie between, or so many
 * CALLS after that.
 *
 *   kill_after REPORT calls|writes N[+CALLS] PROGRAM ARGUMENTS...
 *
 * Writes to the file REPORT: system calls completed, writes begun, number of the last call begun, wait status of the program.
 * Between two system calls a program changes nothing but its own memory: "after the Nth, for every N" covers every
 * state in which it can leave others. The program may itself trace others. Exits with 0 unless it cannot do its work.
 *
 *   child stops itself -> seized -> continued -> exec of the program -> entry, exit, entry, exit ... -> SIGKILL
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/ptrace.h>

static pid_t child;
static unsigned long limit, more, completed, writes;
static int by_writes;
static long last = -1;
/* The child's own calls before its exec, and the exec itself, do not count. */
static int executed, exec_ends;

static void fail(const char *what) {
    perror(what);
    if (child > 0) kill(child, SIGKILL);
    exit(1);
}

static void on_syscall(pid_t thread) {
    struct ptrace_syscall_info info;
    if (ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof info, &info) <= 0 || !executed) return;
    if (info.op == PTRACE_SYSCALL_INFO_ENTRY) {
        last = (long)info.entry.nr;
        if (last == SYS_pwrite64 && ++writes == limit && by_writes) {
            by_writes = 0;
            limit = completed + more;
            /* Killed at its entry, a call does not come about. */
            if (!more) kill(child, SIGKILL);
        }
    }
    if (info.op != PTRACE_SYSCALL_INFO_EXIT) return;
    if (exec_ends) exec_ends = 0;
    else completed++;
    if (completed >= limit && !by_writes) kill(child, SIGKILL);
}

/* Until the last thread is gone; the child's status. */
static int follow(void) {
    int status, ended = -1;
    for (;;) {
        pid_t thread = waitpid(-1, &status, __WALL);
        if (thread < 0 && errno == EINTR) continue;
        if (thread < 0 && errno == ECHILD) return ended;
        if (thread < 0) fail("waitpid");
        if (WIFEXITED(status) || WIFSIGNALED(status)) {
            if (thread == child) ended = status;
            continue;
        }
        int signal = WSTOPSIG(status), event = status >> 16;
        if (signal == (SIGTRAP | 0x80)) {
            on_syscall(thread);
            signal = 0;
        } else if (event) {
            if (event == PTRACE_EVENT_EXEC && thread == child && !executed) executed = exec_ends = 1;
            signal = 0;
        }
        /* Fails when the thread was killed between its stop and here. */
        ptrace(PTRACE_SYSCALL, thread, NULL, (void *)(long)signal);
    }
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    FILE *report = fopen(argv[1], "we");
    if (!report) fail(argv[1]);
    by_writes = !strcmp(argv[2], "writes");
    char *end;
    limit = strtoul(argv[3], &end, 10);
    if (*end == '+') more = strtoul(end + 1, NULL, 10);
    child = fork();
    if (child < 0) fail("fork");
    if (child == 0) {
        raise(SIGSTOP);
        execvp(argv[4], argv + 4);
        _exit(127);
    }
    int status;
    if (waitpid(child, &status, WUNTRACED) < 0 || !WIFSTOPPED(status)) fail("wait for the child");
    long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEEXEC | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK |
                   PTRACE_O_TRACEVFORK | PTRACE_O_EXITKILL;
    if (ptrace(PTRACE_SEIZE, child, NULL, (void *)options)) fail("PTRACE_SEIZE");
    if (kill(child, SIGCONT)) fail("SIGCONT");
    status = follow();
    fprintf(report, "%lu %lu %ld %d\n", completed, writes, last, status);
    return fclose(report) ? 1 : 0;
}
