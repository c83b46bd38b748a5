//! The names of all C++ programs, so that each is a test of its own.

/// Makes a test of every C++ program that must be accepted: it calls `$check` with the program's name.
macro_rules! accepted_cxx_programs {
    ($check:path) => {
        accepted_programs! { $check =>
            anonymous_class
            anonymous_namespace
            call_once
            call_once_new
            cancelled_thread
            catch_in_changed
            catch_new_type
            clone_of_method
            closure_changed
            cold_part_of_method
            constexpr_table
            constructor_body
            coroutine_body
            covariant_result
            default_argument
            destructor_virtual
            dynamic_cast_changed
            enum_class_switch
            exception_specification
            extern_c_and_cxx
            function_try_block
            half_constants
            hidden_visibility
            inline_constant_changed
            inline_equal_bytes
            inline_other_copy
            inline_two_units
            inline_uses_statics
            inline_variable
            lambda_added_before
            lambda_body
            lambda_generic
            lambda_static
            lambda_stored
            method_body
            namespaces
            new_class
            new_exception_class
            new_instance_of_template
            no_exceptions
            operators
            optional_map
            overloads
            references
            relative_table
            rethrow
            series_inline
            shared_pointer
            standard_string
            static_local_guarded
            static_local_new_guarded
            static_local_new_in_inline
            static_local_of_inline
            static_locals_of_one_name
            static_member
            template_method
            template_two_units
            thread_local_dynamic
            thread_local_plain
            thread_local_wrapper
            thread_with_lambda
            throw_from_changed
            thunk
            thunk_virtual
            unwind_destructors
            variant_visit
            virtual_base_constructor
            virtual_inline
            virtual_method
        }
    };
}

/// Makes a test of every C++ program that must be refused, or that leaves nothing to patch.
macro_rules! other_cxx_programs {
    ($check:path) => {
        other_programs! { $check =>
            base_added
            class_member_added
            cxx_comment_only
            cxx_unchanged_class
            enum_class_moved
            first_virtual_function
            inline_variable_changed
            override_added
            second_static_object
            static_local_grown
            static_object_added
            static_object_changed
            template_member_changed
            thread_local_added
            virtual_function_added
            virtual_functions_swapped
        }
    };
}
