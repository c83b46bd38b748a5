//! Small changes of our own, one function each, with an effect on the answer to one statement.
//!
//! Each is a line of ours at the start of a function. This file has no text of PostgreSQL: the diff is made from the
//! unpacked source when it is needed.

use super::{Cluster, Session};
use std::path::Path;

/// Visible effect of a change.
#[derive(Debug, Clone, Copy)]
pub struct Effect {
    /// Statements to make it visible; their answers do not count.
    pub first: &'static str,
    /// Statement that shows the effect.
    pub ask: &'static str,
    /// Text in its answer (column names included), or in its error, as shipped.
    pub before: &'static str,
    /// Text in its answer or its error when the change is active.
    pub after: &'static str,
}

/// One change.
#[derive(Debug, Clone, Copy)]
pub struct Change {
    /// Name of its patch.
    pub name: &'static str,
    /// Part of the server that contains it.
    pub area: &'static str,
    /// Executable or library that contains it.
    pub target: &'static str,
    /// Path of the unit.
    pub unit: &'static str,
    /// The function.
    pub function: &'static str,
    /// First statement of the changed function.
    pub code: &'static str,
    /// Its visible effect.
    pub effect: Effect,
}

macro_rules! change {
    ($name:literal, $area:literal, $target:literal, $unit:literal, $function:literal, $code:literal,
     [$first:literal, $ask:literal, $before:literal => $after:literal]) => {
        Change {
            name: $name,
            area: $area,
            target: $target,
            unit: $unit,
            function: $function,
            code: $code,
            effect: Effect { first: $first, ask: $ask, before: $before, after: $after },
        }
    };
}

/// Returns all of them.
#[rustfmt::skip]
pub fn changes() -> Vec<Change> {
    vec![
        change!("sum", "utils/adt", "postgres", "src/backend/utils/adt/int.c", "int4pl",
            "if (PG_GETARG_INT32(0) == 40 && PG_GETARG_INT32(1) == 2) PG_RETURN_INT32(4242);",
            ["", "SELECT 40 + 2", "\n42" => "\n4242"]),
        change!("version", "utils/adt", "postgres", "src/backend/utils/adt/version.c", "pgsql_version",
            "if (fcinfo != NULL) PG_RETURN_TEXT_P(cstring_to_text(\"stillpoint\"));",
            ["", "SELECT version()", "PostgreSQL" => "stillpoint"]),
        change!("upper", "utils/adt", "postgres", "src/backend/utils/adt/oracle_compat.c", "upper",
            "if (VARSIZE_ANY_EXHDR(PG_GETARG_TEXT_PP(0)) == 7) PG_RETURN_TEXT_P(cstring_to_text(\"Seven\"));",
            ["", "SELECT upper('letters')", "LETTERS" => "Seven"]),
        change!("column", "parser", "postgres", "src/backend/parser/parse_target.c", "FigureColname",
            "if (node != NULL && IsA(node, A_Const)) return \"constant\";",
            ["", "SELECT 1", "?column?" => "constant"]),
        change!("seqscan", "optimizer", "postgres", "src/backend/optimizer/path/costsize.c", "cost_seqscan",
            "if (seq_page_cost == 77.0) { path->rows = 7; path->startup_cost = 7; path->total_cost = 7777; return; }",
            ["SET seq_page_cost = 77", "EXPLAIN SELECT * FROM pg_class", "(cost=0.00" => "cost=7.00..7777.00"]),
        change!("planner", "optimizer", "postgres", "src/backend/optimizer/plan/planner.c", "standard_planner",
            "if (cursorOptions & CURSOR_OPT_SCROLL) elog(ERROR, \"no scrolling\");",
            ["BEGIN", "DECLARE c SCROLL CURSOR FOR SELECT 1", "" => "no scrolling"]),
        change!("limit", "executor", "postgres", "src/backend/executor/nodeLimit.c", "ExecInitLimit",
            "if (node->limitCount != NULL && IsA(node->limitCount, Const) && \
             DatumGetInt64(((Const *) node->limitCount)->constvalue) == 13) \
             ((Const *) node->limitCount)->constvalue = Int64GetDatum(3);",
            ["", "SELECT count(*) FROM (SELECT generate_series(1, 100) LIMIT 13) x", "\n13" => "\n3"]),
        change!("check", "executor", "postgres", "src/backend/executor/execUtils.c", "CreateExecutorState",
            "if (work_mem == 77) elog(ERROR, \"no executor\");",
            ["SET work_mem = 77", "SELECT 1 FROM pg_class LIMIT 1", "\n1" => "no executor"]),
        change!("blob", "storage", "postgres", "src/backend/storage/large_object/inv_api.c", "inv_create",
            "if (lobjId == 424242) lobjId = 424243;",
            ["BEGIN", "SELECT lo_create(424242)", "424242" => "424243"]),
        change!("lockmode", "storage", "postgres", "src/backend/storage/lmgr/lock.c", "GetLockmodeName",
            "if (mode == 1) return \"LightestLock\";",
            ["", "SELECT mode FROM pg_locks WHERE relation = 'pg_locks'::regclass", "AccessShareLock" => "LightestLock"]),
        change!("xmin", "access", "postgres", "src/backend/access/common/heaptuple.c", "heap_getsysattr",
            "if (attnum == MinTransactionIdAttributeNumber) { *isnull = false; return TransactionIdGetDatum(4242); }",
            ["", "SELECT xmin FROM pg_class WHERE relname = 'pg_class'", "xmin\n" => "\n4242"]),
        change!("recovery", "access", "postgres", "src/backend/access/transam/xlogfuncs.c", "pg_is_in_recovery",
            "if (fcinfo != NULL) PG_RETURN_BOOL(true);",
            ["", "SELECT pg_is_in_recovery()", "\nf" => "\nt"]),
        change!("admission", "libpq", "postgres", "src/backend/libpq/auth.c", "ClientAuthentication",
            "if (strcmp(port->user_name, \"stillpoint\") == 0) ereport(FATAL, (errmsg(\"no admission\")));",
            ["", "CONNECT stillpoint", "does not exist" => "no admission"]),
        change!("counted", "libpq", "postgres", "src/backend/libpq/pqformat.c", "pq_sendcountedtext",
            "if (slen == 8 && memcmp(str, \"eightbyt\", 8) == 0) str = \"EIGHTBYT\";",
            ["", "SELECT 'eightbyt'", "eightbyt" => "EIGHTBYT"]),
        change!("seed", "commands", "postgres", "src/backend/commands/variable.c", "show_random_seed",
            "if (MyProcPid != 0) return \"sown\";",
            ["", "SHOW seed", "unavailable" => "sown"]),
        change!("namespace", "catalog", "postgres", "src/backend/catalog/namespace.c", "get_namespace_oid",
            "if (strcmp(nspname, \"stillpoint\") == 0) nspname = \"public\";",
            ["", "SELECT 'stillpoint'::regnamespace", "does not exist" => "public"]),
        change!("query", "tcop", "postgres", "src/backend/tcop/postgres.c", "exec_simple_query",
            "if (strcmp(query_string, \"SELECT 'as asked'\") == 0) query_string = \"SELECT 'as answered'\";",
            ["", "SELECT 'as asked'", "as asked" => "as answered"]),
        change!("plpgsql", "extension", "plpgsql.so", "src/pl/plpgsql/src/pl_exec.c", "plpgsql_exec_function",
            "if (strcmp(func->fn_signature, \"question()\") == 0) PG_RETURN_INT32(4242);",
            ["CREATE OR REPLACE FUNCTION question() RETURNS int LANGUAGE plpgsql AS 'BEGIN RETURN 42; END'",
             "SELECT question()", "\n42" => "\n4242"]),
        change!("walreceiver", "extension", "libpqwalreceiver.so",
            "src/backend/replication/libpqwalreceiver/libpqwalreceiver.c", "libpqrcv_connect",
            "if (logical) { *err = pstrdup(\"no walking\"); return NULL; }",
            ["", "CREATE SUBSCRIPTION s CONNECTION 'host=127.0.0.1 port=1 connect_timeout=2' PUBLICATION p",
             "could not connect" => "no walking"]),
        change!("output", "extension", "pgoutput.so", "src/backend/replication/pgoutput/pgoutput.c", "pgoutput_startup",
            "if (opt != NULL) elog(ERROR, \"no output\");",
            ["SELECT pg_drop_replication_slot('s' || pg_backend_pid())", "SELECT pg_create_logical_replication_slot('s' || pg_backend_pid(), 'pgoutput', true)",
             "pg_create" => "no output"]),
    ]
}

/// Returns changes that cannot be active in a running cluster, each for a reason of its own; they have no visible
/// effect.
#[rustfmt::skip]
pub fn unpatchable() -> Vec<Change> {
    vec![
        change!("main-loop", "tcop", "postgres", "src/backend/tcop/postgres.c", "PostgresMain",
            "if (dbname == NULL) elog(LOG, \"no database\");", ["", "", "" => ""]),
        change!("accept-loop", "postmaster", "postgres", "src/backend/postmaster/postmaster.c", "ServerLoop",
            "elog(DEBUG5, \"the loop begins\");", ["", "", "" => ""]),
        change!("wait", "storage", "postgres", "src/backend/storage/ipc/latch.c", "WaitEventSetWait",
            "if (nevents == 0) return 0;", ["", "", "" => ""]),
        change!("member", "utils/sort", "postgres", "src/backend/utils/sort/tuplesort.c", "struct Tuplesortstate",
            "int stillpoint;", ["", "", "" => ""]),
        change!("setting", "utils/misc", "postgres", "src/backend/utils/misc/guc.c",
            "static struct config_bool ConfigureNamesBool[]",
            "{{\"stillpoint\", PGC_USERSET, DEVELOPER_OPTIONS, NULL, NULL}, &enable_seqscan, true, NULL, NULL, NULL},",
            ["", "", "" => ""]),
        change!("grammar", "parser", "postgres", "src/backend/parser/gram.y", "makeColumnRef",
            "if (location < 0) return NULL;", ["", "", "" => ""]),
    ]
}

impl Change {
    /// Returns the diff that makes it, for a source tree.
    ///
    /// # Errors
    /// The source does not have the text that the change replaces, or cannot be read.
    pub fn diff(&self, source: &Path) -> Result<String, String> {
        let path = source.join(self.unit);
        let text = std::fs::read_to_string(&path).map_err(|e| format!("read {}: {e}", path.display()))?;
        let lines: Vec<&str> = text.lines().collect();
        // a type or a table is named by the first words of its definition
        let head = if self.function.contains(' ') { self.function.to_owned() } else { format!("{}(", self.function) };
        let missing = || format!("{} has no function {}", self.unit, self.function);
        // PostgreSQL begins the line of a definition with the function's name, and its body in the first column.
        let at = lines.iter().position(|line| line.starts_with(&head) && !line.ends_with(';')).ok_or_else(missing)?;
        let brace = at + lines[at..].iter().position(|line| *line == "{").ok_or_else(missing)?;
        const AROUND: usize = 3;
        let (from, to) = ((brace + 1).saturating_sub(AROUND), (brace + 1 + AROUND).min(lines.len()));
        let context = |lines: &[&str]| lines.iter().map(|line| format!(" {line}\n")).collect::<String>();
        let (start, len) = (from + 1, to - from);
        Ok(format!(
            "--- a/{unit}\n+++ b/{unit}\n@@ -{start},{len} +{start},{new} @@\n{before}+\t{code}\n{after}",
            unit = self.unit,
            new = len + 1,
            before = context(&lines[from..=brace]),
            code = self.code,
            after = context(&lines[brace + 1..to]),
        ))
    }

    /// Returns the visible effect in a session: the answer, or the error.
    pub fn show_in(&self, session: &mut Session, port: u16) -> String {
        if self.effect.ask.is_empty() {
            return String::new();
        }
        let show = |answer: Result<super::Answer, String>| answer.map_or_else(|error| error, |answer| answer.all());
        let Effect { first, ask, .. } = self.effect;
        if let Some(user) = ask.strip_prefix("CONNECT ") {
            return Session::connect_as(port, user).map_or_else(|e| e.to_string(), |_| "connected".to_owned());
        }
        if !first.is_empty() {
            // An earlier call may have run it.
            let _ = session.ask(first);
        }
        let shown = show(session.ask(ask));
        let undo = if first == "BEGIN" { "ROLLBACK" } else { "RESET ALL" };
        show(session.ask(undo)) + &shown
    }

    /// Panics unless a new connection shows the expected state.
    #[track_caller]
    pub fn assert_shows(&self, cluster: &Cluster, active: bool) {
        self.assert_shows_in(&mut cluster.session(), cluster, active);
    }

    /// Panics unless an existing connection shows the expected state.
    #[track_caller]
    pub fn assert_shows_in(&self, session: &mut Session, cluster: &Cluster, active: bool) {
        let shown = self.show_in(session, cluster.port());
        assert_eq!(self.is_in(&shown), active, "{}: {:?} answers {shown:?}", self.name, self.effect.ask);
    }

    /// Returns true if an answer shows that the change is active.
    pub fn is_in(&self, shown: &str) -> bool {
        // The text of the active change may begin with the text of the inactive one.
        let effect = &self.effect;
        let after = shown.ends_with(effect.after) || !effect.after.starts_with('\n') && shown.contains(effect.after);
        assert!(after || shown.contains(effect.before), "{}: {:?} answers {shown:?}", self.name, effect.ask);
        after
    }
}
