//! Settings that sessions keep when they move.

/// Settings that change the effect of a session's statements: a session keeps their values from any source. Other
/// settings control how a server works, and stay the server's own. (The categories of `pg_settings` would separate the
/// two, but are in the server's language.) A text of names with one
/// space between two of them.
pub const SESSION_SETTINGS: &str = "DateStyle IntervalStyle TimeZone array_nulls backslash_quote bytea_output \
    check_function_bodies client_min_messages createrole_self_grant default_table_access_method \
    default_text_search_config default_transaction_deferrable default_transaction_isolation \
    default_transaction_read_only escape_string_warning exit_on_error extra_float_digits gin_fuzzy_search_limit \
    icu_validation_level idle_in_transaction_session_timeout idle_session_timeout lc_monetary lc_numeric lc_time \
    lock_timeout quote_all_identifiers restrict_nonsystem_relation_kind row_security search_path \
    standard_conforming_strings statement_timeout synchronous_commit timezone_abbreviations transaction_timeout \
    transform_null_equals xmlbinary xmloption";
