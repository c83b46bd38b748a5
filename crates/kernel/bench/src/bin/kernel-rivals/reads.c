// Reads words of its memory at random, for ever, and prints the rate in million words a second, four times a second.
//   reads MIB
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

int main(int count, char **words) {
    if (count != 2) return 2;
    uint64_t bytes = strtoull(words[1], NULL, 10) << 20, length = bytes / sizeof(uint64_t), at = 1, sum = 0;
    uint64_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return perror("mmap"), 1;
    madvise(memory, bytes, MADV_HUGEPAGE);
    for (uint64_t i = 0; i < length; i++) memory[i] = i * 0x9e3779b97f4a7c15ull;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (;;) {
        double begun = now(), took;
        uint64_t reads = 0;
        do {
            for (int i = 0; i < 10000; i++, reads++) {
                at = at * 6364136223846793005ull + 1442695040888963407ull;
                // the address of each read depends on the last value, so that the processor reads none ahead
                sum += memory[((at >> 20) ^ (sum & 7)) % length];
            }
            took = now() - begun;
        } while (took < 0.25);
        // the sum is printed so that the compiler keeps the reads
        printf("%.3f %016lx\n", reads / took / 1e6, (unsigned long)sum);
    }
}
