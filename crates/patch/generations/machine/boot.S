/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A ROM that starts a kernel, in the place of a boot loader: the emulator has put the kernel and the image of its files into memory
 * (KERNEL_AT, INITRD_AT), and what is left is what the kernel's protocol asks for. BZIMAGE, SETUP_SIZE, INITRD_SIZE, COMMAND_LINE.
 */
#define SEGMENT 0x1000
#define HEAP_END 0xe000
#define COMMAND_LINE_AT 0xf000

	.code16
	.globl _start
_start:	.word 0xaa55
	.byte (end - _start) / 512
	/* Called when devices are found: what is to be done comes at the end, when the machine is to boot. */
	push %ds
	xor %ax, %ax
	mov %ax, %ds
	movw $boot - _start, 0x19 * 4
	mov %cs, 0x19 * 4 + 2
	pop %ds
	lret

boot:	cli
	cld
	mov %cs, %ax
	mov %ax, %ds
	mov $SEGMENT, %ax
	mov %ax, %es
	mov $setup - _start, %si
	xor %di, %di
	mov $SETUP_SIZE / 4, %cx
	rep movsl
	mov $command_line - _start, %si
	mov $COMMAND_LINE_AT, %di
	mov $(command_line_end - command_line), %cx
	rep movsb
	mov %ax, %ds
	mov %ax, %fs
	mov %ax, %gs
	mov %ax, %ss
	mov $HEAP_END, %sp
	ljmp $SEGMENT + 0x20, $0

	.balign 16
setup:	.incbin BZIMAGE, 0, 0x210
	.byte 0xff			/* type_of_loader: none of those with a number */
	.byte 0x81			/* loadflags: high, and there is a heap */
	.incbin BZIMAGE, 0x212, 6
	.long INITRD_AT, INITRD_SIZE
	.incbin BZIMAGE, 0x220, 4
	.word HEAP_END - 0x200		/* heap_end_ptr */
	.incbin BZIMAGE, 0x226, 2
	.long SEGMENT * 16 + COMMAND_LINE_AT
	.incbin BZIMAGE, 0x22c, SETUP_SIZE - 0x22c
command_line:
	.asciz COMMAND_LINE
command_line_end:
	/* The last byte is for the sum of all to be 0. */
	.byte 0
	.balign 512, 0
end:
