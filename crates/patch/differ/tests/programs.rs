//! Every rule of the differ, as a C program with what must come of it (see `driver`).
//!
//! Each case runs in three of nine variants of optimisation, linking, control-flow protection, patchable entries and
//! symbols; with `PROGRAMS_ALL=1` in all nine. One case: `cargo test -p stillpoint-patch-differ --test programs -- NAME`.

mod driver;
mod verdict;

macro_rules! programs {
    ($($name:ident)*) => {
        const LISTED: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                verdict::check(stringify!($name));
            }
        )*
    };
}

programs! {
    alias
    aligned_data
    assertion
    atomic_counter
    avx
    bitfield_changed
    callback_address_compared
    callback_stored
    cleanup_attribute
    cold_part
    cold_part_gained
    comment_only
    common_symbols
    computed_goto
    const_changed
    const_changed_alone
    const_changed_exported
    const_pointer_table_changed
    constant
    constprop_clone
    constructor_added
    constructor_present
    data_changed
    data_changed_with_function
    data_pointer_changed
    debug_missing
    dwarf4
    enumerator_added
    enumerator_moved
    file_static
    file_static_same_name_two_units
    floating_point
    function_name
    function_table
    function_table_row_added
    function_table_row_changed
    global_read_written
    header_two_units
    hook_post_apply
    hot_and_unlikely
    icf_both_change
    icf_one_changes
    ifunc_changed
    ifunc_of_libc
    import_data
    import_data_new
    import_new
    import_new_versioned
    import_unbound
    inline_asm
    inlined
    ipa_ra
    isra_clone
    isra_lost
    jump_table
    jump_table_grown
    large_change
    line_numbers_kept
    line_numbers_moved
    long_double
    loop_to_entry
    loop_to_entry_exported
    loop_to_start
    lto
    macro_changed
    main_calls_changed
    main_changed
    member_added
    member_moved_into_padding
    member_reordered
    member_retyped
    mutex_static
    mutual_recursion
    nested_function
    nested_type_changed
    new_const_table
    new_function
    new_function_across_units
    new_function_recursive
    new_global_initialised
    new_global_zero
    new_static_local
    no_plt
    noreturn_call_last
    part_clone
    prologue_branch
    prologue_call
    prologue_rip_relative
    recursion
    removed_function
    section_attribute
    setjmp
    short_function
    short_function_exported
    short_function_padded
    signal_handler
    signature_in_table
    signature_with_callers
    stack_protector
    startup_section
    static_function_same_name_two_units
    static_local
    static_local_initialised
    static_local_renumbered
    static_local_same_name
    string_changed
    string_new
    string_tail
    struct_return
    switch_table
    tail_call
    thread_cancelled
    thread_function
    tls_each_thread
    tls_errno
    tls_global
    tls_local
    tls_new
    two_units_contract
    type_new
    unchanged
    union_alternative
    union_grown
    varargs
    variable_const_added
    variable_grown
    visibility_hidden
    vla_alloca
    weak
    weak_undefined
}

#[test]
fn every_program_is_listed() {
    let entries = std::fs::read_dir(driver::directory()).expect("read the directory of the programs");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let is_c = |path: &std::path::PathBuf| path.extension().is_some_and(|e| e == "c");
    let stem = |path: std::path::PathBuf| path.file_stem().expect("a name").to_string_lossy().into_owned();
    let mut found: Vec<String> = paths.filter(is_c).map(stem).collect();
    found.sort();
    let mut listed = LISTED.to_vec();
    listed.sort_unstable();
    assert_eq!(found, listed, "tests/programs.rs lists the programs of tests/programs");
}
