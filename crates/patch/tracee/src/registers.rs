//! General registers of a stopped thread.

use stillpoint_patch_format::Avma;

/// General registers, laid out as the kernel's `struct user_regs_struct`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Registers {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    /// Number of the system call that the thread is in, or -1.
    pub orig_rax: u64,
    pub rip: u64,
    pub cs: u64,
    pub eflags: u64,
    pub rsp: u64,
    pub ss: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    pub ds: u64,
    pub es: u64,
    pub fs: u64,
    pub gs: u64,
}

/// `ERESTARTSYS`: the kernel restarts the call unless a handler without `SA_RESTART` runs.
pub(crate) const ERESTARTSYS: i64 = 512;
/// `ERESTARTNOINTR`: the kernel always restarts the call.
pub(crate) const ERESTARTNOINTR: i64 = 513;
/// `ERESTARTNOHAND`: the kernel restarts the call unless a handler runs.
pub(crate) const ERESTARTNOHAND: i64 = 514;
/// `ERESTART_RESTARTBLOCK`: the kernel continues with `restart_syscall`, which needs the state kept in the thread.
pub(crate) const ERESTART_RESTARTBLOCK: i64 = 516;

/// Bytes below the stack pointer that belong to the current function (System V ABI).
pub(crate) const RED_ZONE: u64 = 128;

impl Registers {
    /// Returns the program counter.
    pub fn pc(&self) -> Avma {
        Avma(self.rip)
    }

    /// Returns every register that can hold a code address, the program counter first.
    pub fn values(&self) -> [u64; 17] {
        [
            self.rip, self.rax, self.rbx, self.rcx, self.rdx, self.rsi, self.rdi, self.rbp, self.rsp, self.r8, self.r9,
            self.r10, self.r11, self.r12, self.r13, self.r14, self.r15,
        ]
    }

    /// Returns the number of the system call in which the thread was interrupted or which it is about to leave, if any.
    pub fn syscall(&self) -> Option<u64> {
        ((self.orig_rax as i64) >= 0).then_some(self.orig_rax)
    }

    /// Returns the arguments of that system call. Valid until the thread leaves the call.
    pub fn syscall_args(&self) -> [u64; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }

    /// Returns true for a kernel worker or another thread that has no user side: nothing may be written through them.
    pub fn has_no_user_side(&self) -> bool {
        self.rip == 0 && self.rsp == 0
    }

    /// Returns true if the thread leaves a system call that the kernel will restart by itself.
    pub(crate) fn restarts(&self) -> bool {
        self.syscall().is_some()
            && matches!(-(self.rax as i64), ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK)
    }
}
