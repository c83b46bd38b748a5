//! The names of all programs, so that each is a test of its own.

/// Makes a test of every program that must be accepted: it calls `$check` with the program's name.
macro_rules! accepted_programs {
    ($check:path) => {
        accepted_programs! { $check =>
            alias
            aligned_data
            assertion
            atomic_counter
            avx
            bound_at_start
            callback_address_compared
            callback_stored
            cleanup_attribute
            cold_part
            cold_part_gained
            common_symbols
            computed_goto
            const_changed
            const_changed_alone
            const_pointer_table_changed
            constant
            constprop_clone
            constructor_present
            enumerator_added
            file_static
            file_static_same_name_two_units
            floating_point
            frame_pointer
            function_name
            function_table
            garbage_collected
            global_read_written
            header_two_units
            hook_post_apply
            hot_and_unlikely
            icf_both_change
            icf_one_changes
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
            loop_to_start
            macro_changed
            main_calls_changed
            main_changed
            moved_between_units
            mutex_static
            mutual_recursion
            nested_function
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
            series_new_names
            series_new_unit_function
            series_same_function
            series_static_local
            setjmp
            shipped_with_sections
            short_function
            short_function_padded
            signal_handler
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
            struct_copy
            struct_return
            switch_table
            tail_call
            thread_cancelled
            thread_function
            tls_each_thread
            tls_errno
            tls_global
            tls_local
            two_units_contract
            type_new
            union_alternative
            unsigned_char_table
            varargs
            variable_const_added
            visibility_hidden
            vla_alloca
            weak
            weak_undefined
        }
    };
    ($check:path => $($name:ident)*) => {
        const ACCEPTED: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                $check(stringify!($name));
            }
        )*
    };
}

/// The same for every program that must be refused, or that leaves nothing to patch.
macro_rules! other_programs {
    ($check:path) => {
        other_programs! { $check =>
            bitfield_changed
            comment_only
            const_changed_exported
            constructor_added
            data_changed
            data_changed_with_function
            data_pointer_changed
            debug_missing
            dwarf4
            enumerator_moved
            function_table_row_added
            function_table_row_changed
            garbage_collected_changed
            ifunc_changed
            import_data_new_direct
            loop_to_entry_exported
            lto
            member_added
            member_moved_into_padding
            member_reordered
            member_retyped
            nested_type_changed
            short_function_exported
            signature_in_table
            tls_new
            unchanged
            union_grown
            variable_grown
        }
    };
    ($check:path => $($name:ident)*) => {
        const OTHERS: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                $check(stringify!($name));
            }
        )*
    };
}
