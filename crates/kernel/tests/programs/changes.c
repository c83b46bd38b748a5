// A program with several threads that, at each SIGUSR1, gives up, moves and shares memory, and then checks all of it.
// Every page holds its own number, so that a page in a wrong place, an old one or a zero one is detected.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 4096, THREADS = 4, FORKS = 3 };

static char *kept, *given_up, *moved, *unmapped, *huge;
static uint64_t *shared;
static atomic_int stop;

static char *fresh(size_t pages) {
  char *p = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) abort();
  return p;
}

// memory of huge pages, if the kernel has some
static char *fresh_huge(size_t pages) {
  const size_t huge = 2 << 20;
  char *p = fresh(pages + huge / PAGE);
  p += -(uintptr_t)p % huge;
  madvise(p, pages * PAGE, MADV_HUGEPAGE);
  return p;
}

static void fill(char *p, size_t pages, uint64_t seed) {
  for (size_t i = 0; i < pages; i++) *(uint64_t *)(p + i * PAGE + i % 500 * 8) = seed + i;
}

static size_t wrong(char *p, size_t first, size_t end, uint64_t seed) {
  size_t bad = 0;
  for (size_t i = first; i < end; i++) bad += *(uint64_t *)(p + i * PAGE + i % 500 * 8) != seed + i;
  return bad;
}

static size_t not_zero(char *p, size_t first, size_t end) {
  size_t bad = 0;
  for (size_t i = first; i < end; i++) bad += *(uint64_t *)(p + i * PAGE + i % 500 * 8) != 0;
  return bad;
}

// other threads touch pages all the time, in random order
static void *reader(void *seed) {
  uint64_t x = (uintptr_t)seed * 2654435761u + 1;
  size_t *bad = calloc(1, sizeof *bad);
  while (!atomic_load(&stop)) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    size_t i = (x >> 33) % PAGES;
    *bad += wrong(kept, i, i + 1, 1000);
  }
  return bad;
}

static size_t in_children(void) {
  size_t bad = 0;
  pid_t child[FORKS];
  for (int k = 0; k < FORKS; k++) {
    child[k] = fork();
    if (child[k] < 0) abort();
    if (child[k] == 0) {
      size_t mine = wrong(kept, 0, PAGES, 1000) + wrong(moved, 0, PAGES, 3000) + not_zero(given_up, 0, PAGES / 2);
      // pages that a child gives up stay in the parent
      madvise(kept, PAGES * PAGE, MADV_DONTNEED);
      mine += not_zero(kept, 0, PAGES);
      _exit(mine ? 1 : 0);
    }
  }
  for (int k = 0; k < FORKS; k++) {
    int status;
    waitpid(child[k], &status, 0);
    bad += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  }
  return bad;
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &set, NULL);
  kept = fresh(PAGES);
  shared = mmap(NULL, PAGES / 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  huge = fresh_huge(PAGES);
  fill(kept, PAGES, 1000), fill(huge, PAGES, 6000);
  fill((char *)shared, PAGES / 4, 5000);
  for (int round = 0;; round++) {
    given_up = fresh(PAGES), moved = fresh(PAGES), unmapped = fresh(PAGES);
    fill(given_up, PAGES, 2000), fill(moved, PAGES, 3000), fill(unmapped, PAGES, 4000);
    printf("ready %d\n", round);
    int signal;
    sigwait(&set, &signal);
    pthread_t thread[THREADS];
    atomic_store(&stop, 0);
    for (uintptr_t t = 0; t < THREADS; t++) pthread_create(&thread[t], NULL, reader, (void *)(t + 1));
    size_t bad[6] = {0};
    madvise(given_up, PAGES / 2 * PAGE, MADV_DONTNEED);
    bad[0] = not_zero(given_up, 0, PAGES / 2) + wrong(given_up, PAGES / 2, PAGES, 2000);
    char *room = fresh(2 * PAGES);
    moved = mremap(moved, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, room + PAGES / 2 * PAGE);
    if (moved == MAP_FAILED) abort();
    bad[1] = wrong(moved, 0, PAGES / 3, 3000);
    bad[2] = in_children();
    // part of a huge page is given up while the rest may not be resident yet
    madvise(huge + 100 * PAGE, 50 * PAGE, MADV_DONTNEED);
    bad[0] += not_zero(huge, 100, 150) + wrong(huge, 0, 100, 6000) + wrong(huge, 150, PAGES, 6000);
    fill(huge, PAGES, 6000);
    munmap(unmapped, PAGES / 2 * PAGE);
    char *again = mmap(unmapped, PAGES / 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    bad[3] = not_zero(again, 0, PAGES / 2) + wrong(unmapped, PAGES / 2, PAGES, 4000);
    bad[4] = wrong(moved, 0, PAGES, 3000) + wrong(huge, 0, PAGES, 6000) + wrong(kept, 0, PAGES, 1000) + wrong((char *)shared, 0, PAGES / 4, 5000);
    atomic_store(&stop, 1);
    for (int t = 0; t < THREADS; t++) {
      void *seen;
      pthread_join(thread[t], &seen);
      bad[5] += *(size_t *)seen;
      free(seen);
    }
    size_t all = bad[0] + bad[1] + bad[2] + bad[3] + bad[4] + bad[5];
    printf("round %d: %s (%zu %zu %zu %zu %zu %zu)\n", round, all ? "wrong" : "fine", bad[0], bad[1], bad[2], bad[3], bad[4], bad[5]);
    munmap(given_up, PAGES * PAGE), munmap(unmapped, PAGES * PAGE), munmap(room, 2 * PAGES * PAGE);
  }
}
