/* Functions whose first bytes are hard to displace, called in tight loops by many threads: most instants of these
 * threads lie inside the five bytes that a patch writes.
 *
 *   prologues CONTROL [threads]
 */
#include "control.h"

#include <pthread.h>

#define VERSION 1

#define V STRING(VERSION)
#define NAKED(name, ...) __attribute__((naked, noipa)) long name(long x) { __asm__(__VA_ARGS__); }

/* Data that the prologues reach relative to rip. */
__attribute__((used)) static int word = 16 * 5, flag, table[2] = {16 * 6, 16 * 7};
__attribute__((used)) static long quad = 16 * 8;

/* Spends some time below a displaced call, and answers 16 * 4. */
__attribute__((naked, noipa, used)) static void helper(void) {
    __asm__("mov $200, %eax\n1: dec %eax\n jnz 1b\n mov $64, %eax\n ret");
}

NAKED(branch, "test %edi, %edi\n je 1f\n mov $(16 * 2 + " V "), %eax\n ret\n 1: mov $(16 + " V "), %eax\n ret")
/* Jumps back to its own entry. */
NAKED(backward, "1: sub $1, %edi\n jnz 1b\n mov $(16 * 3 + " V "), %eax\n ret")
NAKED(call_first, "call helper\n add $" V ", %eax\n ret")
NAKED(call_second, "push %rbx\n call helper\n pop %rbx\n add $" V ", %eax\n ret")
NAKED(rip_load, "mov word(%rip), %eax\n add $" V ", %eax\n ret")
NAKED(rip_compare, "cmpl $0, flag(%rip)\n jne 1f\n mov $(16 * 5 + " V "), %eax\n ret\n 1: ud2")
NAKED(rip_address, "lea table(%rip), %rax\n mov (%rax,%rdi,4), %eax\n add $" V ", %eax\n ret")
NAKED(rip_third, "push %rbx\n push %rbp\n mov quad(%rip), %rax\n add $" V ", %rax\n pop %rbp\n pop %rbx\n ret")
NAKED(jump_first, "jmp 1f\n .skip 200, 0xcc\n 1: mov $(16 * 9 + " V "), %eax\n ret")
NAKED(jump_short, "jmp 1f\n int3\n int3\n int3\n int3\n 1: mov $(16 * 9 + " V "), %eax\n ret")
/* An instruction that exists with a one-byte displacement only. */
NAKED(jrcxz_short, "mov %rdi, %rcx\n jrcxz 1f\n mov $(16 * 2 + " V "), %eax\n ret\n 1: mov $(16 + " V "), %eax\n ret")
/* Flags that are set in the first five bytes and used behind them. */
NAKED(flags_across, "cmp $1, %edi\n mov %edi, %eax\n jg 1f\n mov $(16 + " V "), %eax\n ret\n 1: mov $(16 * 2 + " V "), %eax\n ret")
NAKED(endbr, "endbr64\n mov $(16 * 11 + " V "), %eax\n ret")
NAKED(one_byte_each, "push %rax\n push %rcx\n push %rdx\n push %rsi\n push %rdi\n pop %rdi\n pop %rsi\n pop %rdx\n pop %rcx\n"
                     " pop %rax\n mov $(16 * 12 + " V "), %eax\n ret")
NAKED(long_first, "movabs $(16 * 13 + " V "), %rax\n ret")
NAKED(tail_jump, "add $0, %rdi\n jmp tail_end")
NAKED(tail_end, "xor %eax, %eax\n mov $(16 * 14 + " V "), %eax\n ret")
/* A wide store to the red zone: nothing may be written there between the entry and the first instruction. */
NAKED(red_zone, "mov %rdi, -8(%rsp)\n mov -8(%rsp), %rax\n shl $4, %rax\n add $" V ", %rax\n ret")

/* Answers how many of its argument registers, rax (variadic calls), r10 (static chain), r11 and the vector arguments
 * arrived as they were sent; nobody may use one of them on the way to the new code. */
NAKED(all_registers, "push %rbx\n xor %ebx, %ebx\n"
                     " cmp $1, %edi\n jne 9f\n inc %ebx\n cmp $2, %esi\n jne 9f\n inc %ebx\n cmp $3, %edx\n jne 9f\n inc %ebx\n"
                     " cmp $4, %ecx\n jne 9f\n inc %ebx\n cmp $5, %r8d\n jne 9f\n inc %ebx\n cmp $6, %r9d\n jne 9f\n inc %ebx\n"
                     " cmp $7, %eax\n jne 9f\n inc %ebx\n cmp $8, %r10d\n jne 9f\n inc %ebx\n cmp $9, %r11d\n jne 9f\n inc %ebx\n"
                     " movd %xmm0, %eax\n cmp $10, %eax\n jne 9f\n inc %ebx\n movd %xmm1, %eax\n cmp $11, %eax\n jne 9f\n inc %ebx\n"
                     " movd %xmm7, %eax\n cmp $17, %eax\n jne 9f\n inc %ebx\n"
                     " 9: mov %ebx, %eax\n shl $4, %eax\n add $" V ", %eax\n pop %rbx\n ret")

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

static long call_all_registers(void) {
    register long rax __asm__("rax") = 7, r8 __asm__("r8") = 5, r9 __asm__("r9") = 6, r10 __asm__("r10") = 8;
    register long r11 __asm__("r11") = 9;
    long rdi = 1, rsi = 2, rdx = 3, rcx = 4;
    __asm__ volatile("movd %[ten], %%xmm0\n movd %[eleven], %%xmm1\n movd %[seventeen], %%xmm7\n"
                     " sub $128, %%rsp\n call all_registers\n add $128, %%rsp"
                     : "+r"(rax), "+D"(rdi), "+S"(rsi), "+d"(rdx), "+c"(rcx), "+r"(r8), "+r"(r9), "+r"(r10), "+r"(r11)
                     : [ten] "m"((int){10}), [eleven] "m"((int){11}), [seventeen] "m"((int){17})
                     : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                       "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
    return rax;
}

static const struct {
    const char *name;
    long (*function)(long);
    long argument, value;
} cases[] = {
    {"branch (taken)", branch, 0, 1},   {"branch", branch, 5, 2},
    {"backward", backward, 9, 3},
    {"call_first", call_first, 0, 4},   {"call_second", call_second, 0, 4},
    {"rip_load", rip_load, 0, 5},       {"rip_compare", rip_compare, 0, 5},
    {"rip_address", rip_address, 1, 7}, {"rip_third", rip_third, 0, 8},
    {"jump_first", jump_first, 0, 9},   {"jump_short", jump_short, 0, 9},
    {"jrcxz_short (taken)", jrcxz_short, 0, 1},
    {"jrcxz_short", jrcxz_short, 1, 2}, {"flags_across", flags_across, 1, 1},
    {"flags_across", flags_across, 2, 2}, {"endbr", endbr, 0, 11},
    {"one_byte_each", one_byte_each, 0, 12}, {"long_first", long_first, 0, 13},
    {"tail_jump", tail_jump, 0, 14},    {"red_zone", red_zone, 21, 21},
};

static void *hammer(void *arg) {
    struct observer o = observer_new(arg);
    while (!stopping()) {
        for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
            for (int n = 0; n < 64; n++) {
                uint64_t p = phase_now();
                answer(&o, p, cases[i].function(cases[i].argument), cases[i].value, cases[i].name);
            }
        uint64_t p = phase_now();
        answer(&o, p, call_all_registers(), 12, "all_registers");
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    int threads = argc > 2 ? atoi(argv[2]) : 16;
    pthread_t thread;
    for (int i = 0; i < threads; i++) pthread_create(&thread, NULL, hammer, "hammer");
    await_slots((uint32_t)threads);
    while (!stopping()) usleep(1000);
    return atomic_load(&control->violations) != 0;
}
