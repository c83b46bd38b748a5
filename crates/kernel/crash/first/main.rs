//! The first program of the next kernel, and the only one of its crash kernel. It uses only the files beside it, mounts
//! nothing and links nothing.
//!
//! On the next kernel, as `rdinit=`: it loads the old kernel as the crash kernel, then the initramfs continues as
//! without this program. On the crash kernel, as its `/init`: it loads the old kernel once more, with all of the
//! machine's memory, and starts it. `src/lib.rs` describes the files.

#![no_std]
#![no_main]

use core::arch::x86_64::__cpuid_count;
use core::arch::{asm, global_asm};
use core::ffi::CStr;

const DIRECTORY: &CStr = c"/stillpoint";
/// Parts of the crash kernel's initramfs; the second one is the old kernel.
const PARTS: [&CStr; 5] = [c"0", c"1", c"2", c"3", c"4"];
const KERNEL: &CStr = PARTS[1];
const ARCHIVE: &CStr = c"archive";
/// Kernel command line of the crash kernel.
const COMMAND_LINE: &CStr = c"line";
/// The program that is started afterwards.
const NEXT_PROGRAM: &CStr = c"next";
/// Files of the crash kernel: places, data that is neither kernel nor initramfs, kernel, initramfs.
const PLAN: &CStr = c"plan";
const START_DATA: &CStr = c"rest";
const OLD_KERNEL: &CStr = c"kernel";
const OLD_INITRD: &CStr = c"initrd";
/// For tests: panic before anything is loaded.
const FAULT: &CStr = c"stillpoint-fault=first";

// Numbers of system calls and their flags.
const OPEN: usize = 2;
const CLOSE: usize = 3;
const SEEK: usize = 8;
const WRITE: usize = 1;
const MMAP: usize = 9;
const SENDFILE: usize = 40;
const EXECVE: usize = 59;
const EXIT: usize = 60;
const CHDIR: usize = 80;
const UNLINK: usize = 87;
const MKNOD: usize = 133;
const REBOOT: usize = 169;
const KEXEC_LOAD: usize = 246;
const KEXEC_FILE_LOAD: usize = 320;
const NANOSLEEP: usize = 35;
const IOPL: usize = 172;

const WRITE_ONLY: usize = 1;
const CREATE: usize = 0o100;
const END: usize = 2;
const READ_WRITE: usize = 3;
const PRIVATE: usize = 2;
const CHARACTERS: usize = 0o20600;
/// The kernel's log: major 1, minor 11.
const LOG: usize = 0x10b;
const KEXEC_FILE_ON_CRASH: usize = 2;
const MAGIC: [usize; 2] = [0xfee1_dead, 0x2812_1969];
const RESTART: usize = 0x0123_4567;
const KEXEC: usize = 0x4558_4543;
/// Limit in bytes for the end of a file, and for what is copied of it.
const COPY_BYTES_MAX: usize = 1 << 30;
/// Error number: no such device.
const ERROR_NO_DEVICE: usize = 19;
const PAGE: usize = 4096;

/// Ports for the configuration of PCI devices: the number of a register, and its value.
const PCI_ADDRESS: u16 = 0xcf8;
const PCI_VALUE: u16 = 0xcfc;
const PCI_COMMAND: u32 = 4;
const PCI_KIND: u32 = 12;
/// Command bit: the device may read and write memory by itself.
const BUS_MASTER: u32 = 4;
const NO_DEVICE_VALUE: u32 = 0xffff_ffff;
/// Bit of a device with several functions; without it only the first one exists.
const MULTIFUNCTION: u32 = 1 << 23;
/// Time within which transfers in progress have ended.
const TRANSFER_DELAY: [usize; 2] = [0, 100_000_000];

/// Places of everything, as `src/lib.rs` writes them.
#[repr(C)]
struct Plan {
    /// Addresses of the first instruction, and of `rest`, which contains it.
    entry: usize,
    start_data: usize,
    kernel: usize,
    initrd: usize,
    /// Offset in the kernel's file after the code for real mode.
    real_mode_bytes: usize,
    /// Offset in `rest` of the zero byte before additional arguments, for a panic on another processor than the one
    /// that the firmware starts with; 0 if the old kernel cannot run without that one.
    zero: usize,
    boot_processor: usize,
}

/// `struct kexec_segment`.
#[repr(C)]
struct Segment {
    from: *const u8,
    bytes: usize,
    to: usize,
    room: usize,
}

/// A file in memory.
struct MappedFile {
    start: *mut u8,
    bytes: usize,
}

impl MappedFile {
    fn to(&self, to: usize, real_mode_bytes: usize) -> Segment {
        let bytes = self.bytes.saturating_sub(real_mode_bytes);
        let from = self.start.wrapping_add(real_mode_bytes);
        Segment { from, bytes, to, room: bytes.next_multiple_of(PAGE) }
    }
}

global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {begin}",
    "ud2",
    begin = sym begin,
);

/// Runs the program. `stack` is as the kernel leaves it: the number of arguments, these, a null, the environment, a
/// null.
extern "C" fn begin(stack: *const usize) -> ! {
    // SAFETY: the kernel has put the arguments there.
    let arguments = unsafe { stack.add(1) };
    // SAFETY: as above; the environment begins after the null that ends the arguments.
    let environment = unsafe { arguments.add(*stack + 1) };
    let _ = call(CHDIR, [text(DIRECTORY), 0, 0, 0, 0, 0]);
    if open(PLAN, 0).is_ok() {
        let failed = start_old_kernel().err().unwrap_or(0);
        log_message(c"<3>stillpoint: the crash kernel cannot start the old kernel, so the machine restarts: error ", failed);
        let _ = call(REBOOT, [MAGIC[0], MAGIC[1], RESTART, 0, 0, 0]);
        exit();
    }
    if is_panic_requested(environment.cast()) {
        exit();
    }
    match load() {
        Ok(()) => log_message(c"<5>stillpoint: from now on a panic starts the old kernel", 0),
        Err(why) => log_message(c"<3>stillpoint: no crash kernel: error ", why),
    }
    for name in [PARTS[0], PARTS[1], PARTS[2], PARTS[3], PARTS[4], ARCHIVE] {
        let _ = call(UNLINK, [text(name), 0, 0, 0, 0, 0]);
    }
    execute_next(arguments, environment)
}

/// Makes a panic start the crash kernel; runs on the next kernel.
fn load() -> Result<(), usize> {
    let archive = open(ARCHIVE, WRITE_ONLY | CREATE)?;
    for part in PARTS {
        let part = open(part, 0)?;
        while call(SENDFILE, [archive, part, 0, COPY_BYTES_MAX, 0, 0])? > 0 {}
        let _ = call(CLOSE, [part, 0, 0, 0, 0, 0]);
    }
    // the kernel loads only a file that no process has open for writing
    call(CLOSE, [archive, 0, 0, 0, 0, 0])?;
    let (kernel, archive, line) = (open(KERNEL, 0)?, open(ARCHIVE, 0)?, map(COMMAND_LINE)?);
    call(KEXEC_FILE_LOAD, [kernel, archive, line.bytes, line.start as usize, KEXEC_FILE_ON_CRASH, 0]).map(|_| ())
}

/// Starts the old kernel with all of the machine's memory; runs on the crash kernel. Returns only on failure.
fn start_old_kernel() -> Result<(), usize> {
    let (plan, start_data, kernel, initrd) = (map(PLAN)?, map(START_DATA)?, map(OLD_KERNEL)?, map(OLD_INITRD)?);
    // SAFETY: a mapping begins with a page, the file was written with this form, and no other code has it.
    let plan = unsafe { &*plan.start.cast::<Plan>() };
    // The processor that the firmware began with restarts the firmware when it is woken. After a panic on another one
    // it stays stopped.
    if plan.boot_processor != usize::MAX && processor() != plan.boot_processor {
        if plan.zero == 0 {
            return Err(ERROR_NO_DEVICE);
        }
        // SAFETY: a place in that file, which belongs to this program alone.
        unsafe { *start_data.start.add(plan.zero) = b' ' };
    }
    let segments = [start_data.to(plan.start_data, 0), kernel.to(plan.kernel, plan.real_mode_bytes), initrd.to(plan.initrd, 0)];
    call(KEXEC_LOAD, [plan.entry, segments.len(), segments.as_ptr() as usize, 0, 0, 0])?;
    stop_bus_masters()?;
    call(REBOOT, [MAGIC[0], MAGIC[1], KEXEC, 0, 0, 0]).map(|_| ())
}

/// Stops DMA of PCI devices. No driver has stopped them after the panic: they would go on writing to the memory of the
/// kernel that panicked, which belongs to the old kernel in a moment. A kexec stops only devices whose drivers the
/// crash kernel has, and it has none. Only the first PCI segment is covered, which these ports reach.
fn stop_bus_masters() -> Result<(), usize> {
    call(IOPL, [3, 0, 0, 0, 0, 0])?;
    for device in 0..0x2000 {
        for function in 0..8 {
            let place = 0x8000_0000 | device << 11 | function << 8;
            if pci(place) == NO_DEVICE_VALUE {
                if function == 0 {
                    break;
                }
                continue;
            }
            let command = pci(place | PCI_COMMAND) & 0xffff;
            if command & BUS_MASTER != 0 {
                pci_write(place | PCI_COMMAND, (command & !BUS_MASTER) as u16);
            }
            if function == 0 && pci(place | PCI_KIND) & MULTIFUNCTION == 0 {
                break;
            }
        }
    }
    call(NANOSLEEP, [TRANSFER_DELAY.as_ptr() as usize, 0, 0, 0, 0, 0]).map(|_| ())
}

/// Reads a register of a PCI device.
fn pci(place: u32) -> u32 {
    let value: u32;
    // SAFETY: the process may use all ports; these two select a register and read it, and no other code does so on a
    // kernel that has one processor and no other program.
    unsafe {
        asm!("out dx, eax", in("dx") PCI_ADDRESS, in("eax") place, options(nomem, nostack));
        asm!("in eax, dx", in("dx") PCI_VALUE, out("eax") value, options(nomem, nostack));
    }
    value
}

/// Writes the lower half of a register: writing back the upper half of the command register would change the status.
fn pci_write(place: u32, value: u16) {
    // SAFETY: as above; no other code uses the device of that register.
    unsafe {
        asm!("out dx, eax", in("dx") PCI_ADDRESS, in("eax") place, options(nomem, nostack));
        asm!("out dx, ax", in("dx") PCI_VALUE, in("ax") value, options(nomem, nostack));
    }
}

/// Returns the APIC id of this processor, in its long form if there is one.
fn processor() -> usize {
    let long = if __cpuid_count(0, 0).eax >= 0xb { __cpuid_count(0xb, 0) } else { __cpuid_count(0, 0) };
    if __cpuid_count(0, 0).eax >= 0xb && long.ebx != 0 {
        long.edx as usize
    } else {
        (__cpuid_count(1, 0).ebx >> 24) as usize
    }
}

/// Returns true if the kernel command line requests a panic: the environment holds the arguments that the kernel does
/// not know.
fn is_panic_requested(mut environment: *const *const u8) -> bool {
    loop {
        // SAFETY: the environment's pointers are texts and end with a null.
        let entry = unsafe { *environment };
        if entry.is_null() {
            return false;
        }
        // SAFETY: a byte is read only when all before it were as in the other text, and none of them its end.
        let is_it = FAULT.to_bytes_with_nul().iter().enumerate().all(|(at, byte)| unsafe { *entry.add(at) } == *byte);
        if is_it {
            return true;
        }
        // SAFETY: this one was not the null that ends the environment.
        environment = unsafe { environment.add(1) };
    }
}

/// Executes the program that would have been started instead, with the same arguments.
fn execute_next(arguments: *const usize, environment: *const usize) -> ! {
    if let Ok(next) = map(NEXT_PROGRAM) {
        let _ = call(CHDIR, [text(c"/"), 0, 0, 0, 0, 0]);
        // SAFETY: the kernel gives at least one argument, in memory of ours.
        unsafe { *arguments.cast_mut() = next.start as usize };
        let _ = call(EXECVE, [next.start as usize, arguments as usize, environment as usize, 0, 0, 0]);
    }
    exit()
}

/// Ends the program; the kernel then panics.
fn exit() -> ! {
    loop {
        let _ = call(EXIT, [1, 0, 0, 0, 0, 0]);
    }
}

/// Writes to the kernel's log, with a number after the text unless it is 0.
fn log_message(what: &CStr, number: usize) {
    const LOG_BYTES_MAX: usize = 160;
    let mut line = [0; LOG_BYTES_MAX];
    let mut length = 0;
    let mut add = |byte: u8| {
        if let Some(place) = line.get_mut(length) {
            *place = byte;
            length += 1;
        }
    };
    what.to_bytes().iter().for_each(|byte| add(*byte));
    let mut unit = if number == 0 { 0 } else { 1000 };
    while unit > 0 {
        if number >= unit || unit == 1 {
            add(b'0' + (number / unit % 10) as u8);
        }
        unit /= 10;
    }
    add(b'\n');
    let _ = call(MKNOD, [text(c"log"), CHARACTERS, LOG, 0, 0, 0]);
    if let Ok(log) = open(c"log", WRITE_ONLY) {
        let _ = call(WRITE, [log, line.as_ptr() as usize, length, 0, 0, 0]);
    }
}

fn open(name: &CStr, how: usize) -> Result<usize, usize> {
    call(OPEN, [text(name), how, 0o600, 0, 0, 0])
}

/// Maps all of a file; writes to it stay private.
fn map(name: &CStr) -> Result<MappedFile, usize> {
    let file = open(name, 0)?;
    let bytes = call(SEEK, [file, 0, END, 0, 0, 0])?;
    let start = call(MMAP, [0, bytes, READ_WRITE, PRIVATE, file, 0])?;
    Ok(MappedFile { start: start as *mut u8, bytes })
}

fn text(text: &CStr) -> usize {
    text.as_ptr() as usize
}

/// Makes a system call; returns its result, or its error number.
fn call(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> Result<usize, usize> {
    let result: usize;
    // SAFETY: the memory that each call reads or writes is given by reference and long enough at its caller, above; the
    // kernel keeps all registers except three.
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
            in("r9") f, out("rcx") _, out("r11") _);
    }
    if result > usize::MAX - PAGE { Err(result.wrapping_neg()) } else { Ok(result) }
}

/// Function that the compiler calls, and that a C library would contain.
#[unsafe(no_mangle)]
extern "C" fn memset(to: *mut u8, byte: i32, length: usize) -> *mut u8 {
    // SAFETY: the caller owns `length` bytes there.
    unsafe {
        asm!("rep stosb", inout("rdi") to => _, inout("rcx") length => _, in("al") byte as u8, options(nostack, preserves_flags));
    }
    to
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit()
}
