// Has the kernel make an io_uring worker: a read of an empty pipe that must not be tried at once.
#define _GNU_SOURCE
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
    struct io_uring_params params = {0};
    int pipes[2];
    static char byte;
    int ring = syscall(SYS_io_uring_setup, 4, &params);
    if (ring < 0 || pipe(pipes) != 0) {
        printf("ready unavailable 1\n");
        fflush(stdout);
        getchar();
        return 0;
    }
    size_t ring_len = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    char *sq = mmap(0, ring_len, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *sqes = mmap(0, params.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    memset(sqes, 0, sizeof *sqes);
    sqes[0].opcode = IORING_OP_READ;
    sqes[0].flags = IOSQE_ASYNC;
    sqes[0].fd = pipes[0];
    sqes[0].addr = (uint64_t)(uintptr_t)&byte;
    sqes[0].len = 1;
    ((uint32_t *)(sq + params.sq_off.array))[0] = 0;
    __atomic_store_n((uint32_t *)(sq + params.sq_off.tail), 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring, 1, 0, 0, 0, 0) != 1)
        return 1;
    printf("ready unavailable 0\n");
    fflush(stdout);
    char line[16];
    while (fgets(line, sizeof line, stdin)) {
        printf("faults 0\n");
        fflush(stdout);
    }
    return 0;
}
