"""Two servers in roots of two Debian releases, a proxy, the tool, and a load whose answers are timed."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

STATE = Path(os.environ["STATE"]).resolve()
STILLPOINT = os.environ["STILLPOINT"]
TREE = Path(__file__).resolve().parents[4]
OLD, NEW = 15, 17
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "wal_level": "logical",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_senders": "10",
    "max_replication_slots": "10",
    "max_locks_per_transaction": "256",
    "fsync": "off",
}


class Failed(Exception):
    """A step that did not do what it was asked for."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def in_root(root, *command, user=None, environment=None):
    """A command that runs in a root, with a /proc and /dev of its own."""
    script = 'root=$1; shift; mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; exec chroot "$root" "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, "sh", str(root)]
    words += ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]
    words += [f"{name}={value}" for name, value in (environment or {}).items()]
    if user:
        words += ["setpriv", "--reuid", user, "--regid", user, "--init-groups", "--"]
    return words + [str(word) for word in command]


def run(words, **options):
    """Runs a command, and returns its output."""
    done = subprocess.run(words, stdin=options.pop("stdin", subprocess.DEVNULL), capture_output=True, text=True, **options)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, words[-12:]))}: {done.stderr.strip()[-2000:]}")
    return done.stdout


class Server:
    """A server of one major version, with data of its own."""

    def __init__(self, major, name, settings):
        self.major, self.port = major, free_port()
        self.root = STATE / "roots" / f"db{major}"
        self.inside = f"/srv/{name}"
        place = self.root / self.inside[1:]
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        run(["chroot", self.root, "chown", "postgres:", self.inside])
        self.programs = f"/usr/lib/postgresql/{major}/bin"
        run(in_root(self.root, f"{self.programs}/initdb", "-D", f"{self.inside}/data", "--auth=trust", "--encoding=UTF8",
                    "--locale=C.UTF-8", "--username=postgres", "--no-sync", user="postgres"))
        words = [f"{self.programs}/postgres", "-D", f"{self.inside}/data", "-p", self.port, "-k", self.inside]
        for setting, value in {**SETTINGS, **settings}.items():
            words += ["-c", f"{setting}={value}"]
        self.log = open(place / "log", "w")
        self.process = subprocess.Popen(in_root(self.root, *words, user="postgres"), stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=self.log)
        for _ in range(300):
            try:
                self.sql("SELECT 1")
                return
            except Failed:
                time.sleep(0.1)
        raise Failed(f"PostgreSQL {major} does not answer: {(place / 'log').read_text()[-2000:]}")

    def sql(self, text, database="postgres", **environment):
        """Runs SQL with psql, and returns what it prints."""
        words = in_root(self.root, f"{self.programs}/psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1",
                        "-p", self.port, "-U", "postgres", "-d", database, "-f", "-", environment=environment)
        done = subprocess.run(words, input=text, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"{text[:200]}: {done.stderr.strip()[-2000:]}")
        return done.stdout.strip()

    def conninfo(self, database):
        return f"host=127.0.0.1 port={self.port} user=postgres dbname={database}"

    def stop(self):
        self.process.terminate()
        pid = self.root / self.inside[1:] / "data/postmaster.pid"
        try:
            os.kill(int(pid.read_text().split()[0]), 2)
        except (OSError, ValueError):
            pass
        self.process.wait(30)


def client_programs():
    """A directory with pg_dump and pg_restore of the newer version, which run by their own loader outside of their root."""
    place = STATE / "bin"
    place.mkdir(exist_ok=True)
    root = STATE / "roots" / f"db{NEW}"
    for name in ["pg_dump", "pg_restore", "pg_dumpall"]:
        program = place / name
        program.write_text(
            f'#!/bin/sh\nexec {root}/lib64/ld-linux-x86-64.so.2 --library-path {root}/usr/lib/x86_64-linux-gnu --argv0 "$0" '
            f'{root}/usr/lib/postgresql/{NEW}/bin/{name} "$@"\n')
        program.chmod(0o755)
    return place


class Load:
    """Clients that repeat an operation until they are told to stop; every answer is timed."""

    def __init__(self, clients, think_s):
        """`clients` are functions that do one operation; each runs in a thread of its own."""
        self.answers, self.errors, self.lock, self.think_s = [], [], threading.Lock(), think_s
        self.going, self.ended, self.busy = threading.Event(), False, 0
        self.threads = [threading.Thread(target=self.work, args=[client], daemon=True) for client in clients]
        self.going.set()
        for thread in self.threads:
            thread.start()

    def work(self, client):
        while not self.ended:
            self.going.wait()
            with self.lock:
                self.busy += 1
            begun = time.monotonic()
            try:
                client()
            except Exception as error:
                said, cause = f"{type(error).__name__}: {str(error).strip()[:300]}", error.__cause__ or error.__context__
                if cause:
                    said += f" (after {type(cause).__name__}: {str(cause).strip()[:300]})"
                with self.lock:
                    self.errors.append((time.monotonic(), said))
                time.sleep(0.2)
            with self.lock:
                self.answers.append((begun, time.monotonic()))
                self.busy -= 1
            time.sleep(self.think_s)

    def quiet(self):
        """Lets each client end its operation and begin no other."""
        self.going.clear()
        time.sleep(0.05)
        for _ in range(600):
            with self.lock:
                if self.busy == 0:
                    return
            time.sleep(0.05)
        raise Failed("clients do not end their operations")

    def resume(self):
        self.going.set()

    def stop(self):
        self.ended = True
        self.going.set()
        for thread in self.threads:
            thread.join(60)

    def longest(self, begun, ended):
        """The longest wait for an answer, in ms, of the operations that ran between two moments."""
        with self.lock:
            inside = [end - start for start, end in self.answers if end > begun and start < ended]
        return max(inside, default=0) * 1000

    def count(self):
        with self.lock:
            return len(self.answers)


class Stage:
    """All parts of one migration."""

    def __init__(self, name, settings_old=None, settings_new=None, database="app"):
        self.name, self.database = name, database
        self.settings_new = settings_new or settings_old or {}
        self.old = Server(OLD, name, settings_old or {})
        self.new = Server(NEW, name, self.settings_new)
        self.place = STATE / "stages" / name
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        self.port = free_port()
        self.proxy = None
        self.programs = client_programs()
        self.environment = {**os.environ, "PATH": f"{self.programs}:{os.environ['PATH']}"}
        self.events = []

    def start_proxy(self):
        config = self.place / "proxy.toml"
        config.write_text(
            f'listen = ["127.0.0.1:{self.port}"]\ncontrol = "{self.place}/proxy.sock"\nroutes = "{self.place}/routes.json"\n'
            f'workers = 2\n[servers.old]\nhost = "127.0.0.1"\nport = {self.old.port}\n'
            f'[tenants.{self.database}]\nserver = "old"\n')
        log = open(self.place / "proxy.log", "w")
        self.proxy = subprocess.Popen([STILLPOINT, "--json", "migrate", "proxy", "--config", config], stdin=subprocess.DEVNULL,
                                      stdout=log, stderr=log)
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise Failed("the proxy does not listen")

    def through_proxy(self):
        return f"host=127.0.0.1 port={self.port} user=postgres dbname={self.database}"

    def command(self, *words):
        return [STILLPOINT, "--json", "migrate", *words, "--source", self.old.conninfo(self.database),
                "--target", self.new.conninfo(self.database), "--proxy", f"{self.place}/proxy.sock",
                "--state", f"{self.place}/state"]

    def tool(self, *words, limit=600):
        """Runs a command of the tool; returns its exit code, events and errors."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, env=self.environment, timeout=limit)
        with open(self.place / "tool.log", "a") as log:
            log.write(f"$ {' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}\n")
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return done.returncode, events, done.stderr.strip()

    def start_tool(self, *words):
        """Starts a command of the tool that goes on."""
        log = open(self.place / "tool.log", "a")
        return subprocess.Popen(self.command(*words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment)

    def dump(self, server, *words):
        """What pg_dump of the newer version says about one side."""
        return run([self.programs / "pg_dump", *words, "-d", server.conninfo(self.database)], env=self.environment)

    def schema(self, server):
        """Definitions of one side, with the database's own settings. Left out are comments, which name the version of the
        server, and psql's lock on commands, which has a random word."""
        text = self.dump(server, "--create", "--schema-only", "--exclude-schema=stillpoint")
        return [line for line in text.splitlines() if line and not line.startswith("--") and not re.match(r"\\(un)?restrict ", line)]

    def data(self, server):
        """Rows of one side by table; their order in a table has no meaning, so they are sorted."""
        tables, rows = {}, None
        for line in self.dump(server, "--data-only", "--exclude-schema=stillpoint").splitlines():
            if rows is not None:
                if line == "\\.":
                    rows.sort()
                    rows = None
                else:
                    rows.append(line)
            elif line.startswith("COPY "):
                rows = tables.setdefault(line, [])
            elif line and not line.startswith(("--", "SET ", "\\restrict ", "\\unrestrict ")):
                tables.setdefault("other", []).append(line)
        return tables

    def roles(self, server):
        """Roles of one side, without their passwords' salts (there are none here) and comments."""
        text = run([self.programs / "pg_dumpall", "--roles-only", "-d", server.conninfo("postgres")], env=self.environment)
        return [line for line in text.splitlines() if line and not line.startswith("--") and not re.match(r"\\(un)?restrict ", line)]

    def objects(self, server):
        """Numbers of objects by kind that are the user's or hold the user's rows."""
        return server.sql("""
            WITH mine AS (SELECT c.* FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname !~ '^pg_' AND
              n.nspname NOT IN ('information_schema', 'stillpoint')),
            kinds (kind, number) AS (
              SELECT CASE relkind WHEN 'r' THEN CASE WHEN relispartition THEN 'partitions' ELSE 'tables' END WHEN 'p' THEN 'partitioned tables'
                WHEN 'v' THEN 'views' WHEN 'm' THEN 'materialized views' WHEN 'S' THEN 'sequences' WHEN 'i' THEN 'indexes' WHEN 'I' THEN
                'partitioned indexes' WHEN 'f' THEN 'foreign tables' ELSE 'types of rows' END, count(*) FROM mine GROUP BY 1
              UNION ALL SELECT 'extensions', count(*) FROM pg_extension WHERE extname <> 'plpgsql'
              UNION ALL SELECT 'triggers', count(*) FROM pg_trigger WHERE NOT tgisinternal
              UNION ALL SELECT 'event triggers', count(*) FROM pg_event_trigger
              UNION ALL SELECT 'rules', count(*) FROM pg_rewrite r JOIN mine ON mine.oid = ev_class WHERE rulename <> '_RETURN'
              UNION ALL SELECT 'policies', count(*) FROM pg_policy
              UNION ALL SELECT 'foreign keys', count(*) FROM pg_constraint WHERE contype = 'f'
              UNION ALL SELECT 'checks', count(*) FROM pg_constraint WHERE contype = 'c'
              UNION ALL SELECT 'exclusion constraints', count(*) FROM pg_constraint WHERE contype = 'x'
              UNION ALL SELECT 'functions', count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname !~ '^pg_'
                AND n.nspname <> 'information_schema' AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_proc'::regclass AND
                d.objid = p.oid AND d.deptype = 'e')
              UNION ALL SELECT 'types', count(*) FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace WHERE typtype IN ('e', 'd', 'r')
                AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
              UNION ALL SELECT 'large objects', count(*) FROM pg_largeobject_metadata
              UNION ALL SELECT 'publications', count(*) FROM pg_publication WHERE pubname !~ '^stillpoint')
            SELECT string_agg(number || ' ' || kind, ', ' ORDER BY number DESC) FROM kinds WHERE number > 0""", self.database)

    def reference(self, edits):
        """Definitions of the older side as a server of the newer version shows them: what pg_dump and psql alone make of them on a third
        server. The versions print some definitions differently, for instance columns of a view's only table."""
        third = Server(NEW, f"{self.name}-reference", self.settings_new)
        try:
            third.sql(run([self.programs / "pg_dumpall", "--roles-only", "-d", self.old.conninfo("postgres")], env=self.environment)
                      .replace("CREATE ROLE postgres;", ""))
            text = self.dump(self.old, "--create", "--schema-only", "--exclude-schema=stillpoint")
            for pattern, replacement in edits:
                text = re.sub(pattern, replacement, text)
            # Event triggers of the user would act on what psql defines.
            third.sql(text, PGOPTIONS="-c event_triggers=off")
            return {"schema": self.schema(third), "roles": self.roles(third)}
        finally:
            third.stop()

    def close(self):
        if self.proxy:
            self.proxy.terminate()
            self.proxy.wait(30)
        for server in [self.old, self.new]:
            server.stop()


def differences(before, after, limit=20):
    """Differences of two lists of lines, or of two dictionaries of them."""
    if isinstance(before, dict):
        found = []
        for name in sorted({*before, *after}):
            found += [f"{name[:80]}: {difference}" for difference in differences(before.get(name, []), after.get(name, []), 5)]
        return found
    if before == after:
        return []
    from difflib import unified_diff
    found = [line for line in unified_diff(before, after, lineterm="", n=0) if not line.startswith(("---", "+++", "@@"))]
    return found[:limit] + ([f"... {len(found) - limit} more"] if len(found) > limit else [])
