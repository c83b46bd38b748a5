// A program with memory that no other process can read, and nothing else that criu cannot take along.
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void) {
    int fd = syscall(SYS_memfd_secret, 0);
    if (fd < 0 || ftruncate(fd, 4096) != 0) {
        puts("none");
    } else {
        char *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (memory != MAP_FAILED) {
            *memory = 1;
        }
        close(fd);
        puts(memory == MAP_FAILED ? "none" : "mapped");
    }
    fflush(stdout);
    pause();
    return 0;
}
