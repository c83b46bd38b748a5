//! The C source of shadow variables under the address and undefined-behaviour sanitizers.

use std::fs;
use std::process::Command;
use stillpoint_patch_builder::SHADOW_SOURCES;

const PROGRAM: &str = r#"
#include "stillpoint-shadow.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define OBJECTS 3000
#define CHECK(condition) do { if (!(condition)) { printf("line %d: %s\n", __LINE__, #condition); exit(1); } } while (0)

static int objects[OBJECTS];

static void *race(void *unused)
{
    for (int i = 0; i < OBJECTS; i++) {
        int *count = sp_shadow_get_or_alloc(&objects[i], 9, sizeof *count);
        CHECK(count);
        __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
    }
    return unused;
}

int main(void)
{
    pthread_t threads[4];

    for (int i = 0; i < OBJECTS; i++) {
        int *shadow = sp_shadow_alloc(&objects[i], 1, sizeof *shadow);
        CHECK(shadow && *shadow == 0);
        *shadow = i;
        CHECK(!sp_shadow_alloc(&objects[i], 1, sizeof *shadow));
        CHECK(sp_shadow_get_or_alloc(&objects[i], 1, 4) == shadow);
        CHECK(sp_shadow_alloc(&objects[i], 2, 64));
    }
    for (int i = 0; i < OBJECTS; i++)
        CHECK(*(int *)sp_shadow_get(&objects[i], 1) == i);
    sp_shadow_free(&objects[5], 1);
    CHECK(!sp_shadow_get(&objects[5], 1));
    sp_shadow_free_all(1);
    for (int i = 0; i < OBJECTS; i++) {
        CHECK(!sp_shadow_get(&objects[i], 1));
        CHECK(sp_shadow_get(&objects[i], 2));
    }
    for (int i = 0; i < 4; i++)
        CHECK(!pthread_create(&threads[i], NULL, race, NULL));
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < OBJECTS; i++)
        CHECK(*(int *)sp_shadow_get(&objects[i], 9) == 4);
    sp_shadow_free_all(2);
    sp_shadow_free_all(9);
    /* the memory of what was ended goes with the next one made, which the leak check sees */
    CHECK(sp_shadow_alloc(objects, 1, 1));
    sp_shadow_free(objects, 1);
    CHECK(!sp_shadow_alloc(objects, 1, (size_t)-1));
    puts("kept");
    return 0;
}
"#;

#[test]
fn shadow_variables_keep_their_promises() {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in SHADOW_SOURCES.iter().copied().chain([("main.c", PROGRAM)]) {
        fs::write(directory.path().join(name), text).unwrap();
    }
    let compile = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"])
        .args(["-fno-sanitize-recover=all", "-pthread", "main.c", "stillpoint-shadow.c", "-o", "program"])
        .current_dir(directory.path())
        .output()
        .unwrap();
    assert!(compile.status.success(), "{}", String::from_utf8_lossy(&compile.stderr));
    let output = Command::new(directory.path().join("program"))
        .env("ASAN_OPTIONS", "allocator_may_return_null=1")
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "kept\n", "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
