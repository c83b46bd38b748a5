//! Rewriting of members into shadow variables, with the machine's own compiler as the judge of types.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use stillpoint_patch_shadow::{Checked, RUNTIME, Refusal, Request, Rewritten, ShadowMember, Stop, rewrite};

/// Uses of a member in all forms; another structure has one of the same name.
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct connection connection_t;
struct other { int extra; };
struct connection { long id; connection_t *next; unsigned extra : 5; };
struct holder { int n; connection_t inner; };
static struct connection global;
static connection_t table[4];
#define EXTRA(c) ((c)->extra)
#define NEW(n) ((connection_t *)malloc(sizeof(connection_t) * (n)))
connection_t *make(void) { connection_t *c = calloc(1, sizeof *c); if (c) c->extra += 5; return c; }
connection_t *many(size_t n) { connection_t *c = NEW(n); memset(c, 0, n * sizeof(connection_t)); return c; }
struct holder *hold(void) { struct holder *h = calloc(1, sizeof(struct holder)); h->inner.extra++; return h; }
int use(connection_t *c, struct other *o)
{
    o->extra = 3;
    EXTRA(c) |= 64 + 2;
    c->next->extra--;
    table[2].extra = c->next->next ? c->next->next->extra : 7;
    return EXTRA(c->next) + o->extra + (*c).extra + global.extra + table[2].extra + (int)(sizeof table / sizeof table[0]);
}
/*MORE*/
int main(void)
{
    struct other o;
    connection_t *c = make(), *d = many(3);
    c->next = d;
    int used = use(c, &o);
    printf("%d %d ", used, c->extra);
    for (int i = 0; i < 3; i++) d[i].extra = 9 + i;
    free(d);
    d = many(3);
    printf("%d %d %d ", d[0].extra, d[1].extra, d[2].extra);
    free(c);
    c = make();
    struct holder *h = hold();
    printf("%d %d\n", c->extra, h->inner.extra);
    return 0;
}
"#;

fn run(program: &str, words: &[&str], directory: &Path) -> Output {
    Command::new(program).args(words).current_dir(directory).env("LC_ALL", "C").output().unwrap()
}

fn rewritten(directory: &Path, text: &str, member: &str, allocators: &[&str]) -> Result<Rewritten, Vec<Refusal>> {
    fs::write(directory.join("program.c"), text).unwrap();
    let preprocessed = run("cc", &["-E", "-O2", "program.c"], directory);
    assert!(preprocessed.status.success(), "{}", String::from_utf8_lossy(&preprocessed.stderr));
    let members = [ShadowMember::parse(member).unwrap()];
    let allocators: Vec<String> = allocators.iter().map(|name| name.to_string()).collect();
    let flags = ["-fsyntax-only", "-Werror=incompatible-pointer-types", "-Werror=int-conversion", "question.i"];
    let mut check = |text: &[u8]| {
        fs::write(directory.join("question.i"), text)?;
        let answer = run("cc", &flags, directory);
        let printed = String::from_utf8_lossy(&answer.stderr).into_owned();
        Ok::<_, std::io::Error>(Checked { is_clean: answer.status.success(), printed })
    };
    match rewrite(preprocessed.stdout, Request { members: &members, allocators: &allocators }, &mut check) {
        Ok(rewritten) => Ok(rewritten),
        Err(Stop::Refused(refusals)) => Err(refusals),
        Err(Stop::Compiler(error)) => panic!("{error}"),
    }
}

#[test]
fn a_rewritten_program_does_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let result = rewritten(at, PROGRAM, "struct connection.extra", &[]).unwrap();
    let origins = result.origins[0].clone().unwrap();
    for function in ["`calloc`", "`malloc`", "`memset`", "`global`, ", "`table`, "] {
        assert!(origins.iter().any(|origin| origin.what.starts_with(function)), "{function}: {origins:?}");
    }
    fs::write(at.join("rewritten.i"), &result.text).unwrap();
    fs::write(at.join(RUNTIME.0), RUNTIME.1).unwrap();
    let build = ["-O2", "-Wall", "-Wextra", "-Werror", "rewritten.i", RUNTIME.0, "-o", "rewritten"];
    for build in [&build[..], &["-O2", "program.c", "-o", "original"]] {
        let made = run("cc", build, at);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }
    let shown = |name: &str| String::from_utf8(run(at.join(name).to_str().unwrap(), &[], at).stdout).unwrap();
    assert_eq!(shown("original"), "52 7 0 0 0 5 1\n");
    assert_eq!(shown("rewritten"), shown("original"));
}

#[test]
fn uses_that_a_table_cannot_follow_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let cases = [
        ("int more(void) { connection_t x; x.id = 1; return (int)x.id; }", "shadow-stack-object"),
        ("int more(connection_t *c) { __typeof__(*c) x; x.id = 1; return (int)x.id; }", "shadow-stack-object"),
        ("int more(connection_t *c) { return use(c, 0) + use(&(connection_t){ .id = 1 }, 0); }", "shadow-stack-object"),
        ("static __thread connection_t more;", "shadow-stack-object"),
        ("void more(connection_t *c, connection_t *d) { *c = *d; }", "shadow-assignment"),
        ("void more(struct holder *c, struct holder *d) { *c = *d; }", "shadow-assignment"),
        ("void more(connection_t *c, void *d) { memcpy(c, d, sizeof(*c)); }", "shadow-copy"),
        ("void more(struct holder *c, void *d, size_t n) { memcpy(c, d, n); }", "shadow-copy"),
        ("void more(connection_t *c) { memset(c, 1, sizeof *c); }", "shadow-copy"),
        ("void *more(connection_t *c) { return realloc(c, 2 * sizeof(connection_t)); }", "shadow-resize"),
        ("void *get(size_t n); void *more(void) { return get(sizeof(connection_t)); }", "shadow-size"),
        ("size_t more(void) { return sizeof(struct holder); }", "shadow-size"),
        (
            "void *get(size_t n); void *more(void) { return get(__builtin_offsetof(connection_t, next) + 40); }",
            "shadow-size",
        ),
        ("union more { int a; connection_t c; };", "shadow-union"),
        ("connection_t more = { 1, 0, 2 };", "shadow-initialiser"),
        ("connection_t more = { .extra = 1 };", "shadow-initialiser"),
        ("connection_t more(connection_t *c) { return *c; }", "shadow-by-value"),
        ("int more(connection_t c) { return (int)c.id; }", "shadow-by-value"),
        ("int more(connection_t *c) { __typeof__(c->extra + 0) x = 1; return (int)x; }", "shadow-unseen"),
    ];
    for (more, code) in cases {
        let text = PROGRAM.replace("/*MORE*/", more);
        let refusals = rewritten(directory.path(), &text, "connection.extra", &[]).unwrap_err();
        assert!(refusals.iter().all(|refusal| refusal.code() == code), "{more}: {refusals:?}");
        assert!(refusals[0].place.starts_with("program.c:"), "{more}: {refusals:?}");
    }
    let addressed = PROGRAM
        .replace("unsigned extra : 5", "int extra")
        .replace("/*MORE*/", "int *more(connection_t *c) { return &c->extra; }");
    assert_eq!(
        rewritten(directory.path(), &addressed, "connection.extra", &[]).unwrap_err()[0].code(),
        "shadow-address"
    );
    let array = PROGRAM.replace("unsigned extra : 5", "unsigned extra : 5; char name[8]");
    let element = array.replace("/*MORE*/", "char more(connection_t *c) { return c->name[1]++; }");
    rewritten(directory.path(), &element, "connection.name", &[]).unwrap();
    let whole = array.replace("/*MORE*/", "char *more(connection_t *c) { return c->name; }");
    assert_eq!(rewritten(directory.path(), &whole, "connection.name", &[]).unwrap_err()[0].code(), "shadow-address");
    for hidden in [
        "typedef char name_t[8];\nstruct connection { long id; name_t name;",
        "struct connection { long id; char name[2][4];",
    ] {
        let text = PROGRAM.replace("struct connection { long id;", hidden);
        assert_eq!(rewritten(directory.path(), &text, "connection.name", &[]).unwrap_err()[0].code(), "shadow-type");
    }
    let value = rewritten(directory.path(), PROGRAM, "connection.extra=3", &[]).unwrap_err();
    assert_eq!(value[0].code(), "shadow-value");
}

#[test]
fn an_author_names_allocators() {
    let directory = tempfile::tempdir().unwrap();
    let get = "void *get(void *pool, size_t n);\nvoid *more(void) { return get(0, sizeof(connection_t)); }";
    let text = PROGRAM.replace("/*MORE*/", get);
    let refusals = rewritten(directory.path(), &text, "connection.extra", &[]).unwrap_err();
    assert_eq!(refusals[0].allocator.as_deref(), Some("get"));
    rewritten(directory.path(), &text, "connection.extra", &["get"]).unwrap_err();
    let text = text.replace("get(0, ", "get(pool, ").replace("more(void)", "more(void *pool)");
    rewritten(directory.path(), &text, "connection.extra", &["get"]).unwrap();
    let declared = text.replace("size_t n);\nvoid *more", "size_t n) __attribute__((alloc_size(2)));\nvoid *more");
    rewritten(directory.path(), &declared, "connection.extra", &[]).unwrap();
}

/// Threads and a signal handler that count in the members of the same objects, and a table that is full.
const TABLE: &str = r#"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
void *__stillpoint_member(unsigned long object, unsigned long id, unsigned long len, void *value);
void __stillpoint_member_clear(unsigned long start, unsigned long len, unsigned long id);
int __stillpoint_members_forget(void);
extern unsigned long __stillpoint_members_lost;
static long objects[20000];
static int *member(long *object) { int value = 7; return __stillpoint_member((unsigned long)object, 5, 4, &value); }
static unsigned signals;
static void handler(int signal)
{
    int saved = errno;
    (void)signal;
    __atomic_add_fetch(member(&objects[__atomic_fetch_add(&signals, 1, 5) % COUNT]), 0, 5);
    errno = saved;
}
static void *count(void *arg)
{
    for (int round = 0; round < 20; round++)
        for (int i = 0; i < COUNT; i++)
            __atomic_add_fetch(member(&objects[i]), 1, 5);
    return arg;
}
int main(void)
{
    pthread_t threads[4];
    int wrong = 0;
    signal(SIGALRM, handler);
    setitimer(ITIMER_REAL, &(struct itimerval){ { 0, 500 }, { 0, 500 } }, NULL);
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, count, NULL);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < COUNT; i++) wrong += *member(&objects[i]) != 87;
    /* a range, from the middle of an object on */
    __stillpoint_member_clear((unsigned long)&objects[4] + 3, 8 * 10, 5);
    __stillpoint_member_clear((unsigned long)objects, sizeof objects, 6);
    for (int i = 0; i < COUNT; i++) wrong += *member(&objects[i]) != (i > 4 && i < 15 ? 0 : 87);
    __stillpoint_member_clear((unsigned long)objects, sizeof objects, 5);
    for (int i = 0; i < COUNT; i++) wrong += *member(&objects[i]) != 0;
    if (__stillpoint_members_forget()) wrong++;
    for (int i = 0; i < COUNT; i++) wrong += *member(&objects[i]) != 7;
    printf("%d wrong, lost %d\n", wrong, __stillpoint_members_lost > 0);
    memset(objects, 0, sizeof objects);
    for (int i = 0; i < 20000; i++)
        if (i >= COUNT) {
            int value = 3, *got = __stillpoint_member((unsigned long)&objects[i], 5, 4, &value);
            if (*got != 3) puts("not the initial value");
            *got = 4;
        }
    printf("full %d\n", __stillpoint_members_lost > 0);
    return 0;
}
"#;

#[test]
fn the_table_serves_threads_and_signals_and_may_be_full() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    fs::write(at.join("program.c"), TABLE).unwrap();
    fs::write(at.join(RUNTIME.0), RUNTIME.1).unwrap();
    for (flags, full) in [(["-DCOUNT=20", "-fsanitize=thread"], "full 0"), (["-DCOUNT=20", "-DSLOTS=64ul"], "full 1")] {
        let words = ["-O1", "-g", "-Wall", "-Wextra", "-pthread", "program.c", RUNTIME.0, "-o", "program"];
        let made = run("cc", &[&flags[..], &words[..]].concat(), at);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let result = run(at.join("program").to_str().unwrap(), &[], at);
        let shown = String::from_utf8_lossy(&result.stdout);
        assert_eq!(shown.lines().collect::<Vec<_>>(), ["0 wrong, lost 0", full], "{result:?}");
        assert!(result.status.success(), "{result:?}");
    }
}
