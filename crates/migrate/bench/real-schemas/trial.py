"""One schema's way from the older server to the newer one and back, twice, under its own load; and its row of the page."""

import os
import re
import sys
import time

from testbed import Failed, Load, Stage, differences

# Seconds of load before and after each change of sides.
SETTLE_S = 3
# More words for `run` and `fallback`, from the environment.
RUN_WORDS, FALLBACK_WORDS = (os.environ.get(name, "").split() for name in ["RUN_WORDS", "FALLBACK_WORDS"])


class Schema:
    """A schema: where it comes from, what it is, and what its clients do. Each file of schemas derives one."""

    name = title = source = ""
    settings, settings_new, database = {}, None, "app"
    check_words, run_words = [], []
    # Differences that are known, and their reasons.
    explained = []
    # Seconds between an answer and a client's next request.
    think_s = 0.02
    # Changes to the dump of which the reference is made: what psql alone cannot define on the newer server.
    reference_edits = []

    def prepare(self, stage):
        """Makes the database `stage.database` on the older server."""
        raise NotImplementedError

    def prepare_target(self, stage):
        """Makes roles and the like, which a migration asks for, on the newer server."""

    def clients(self, stage):
        """Functions that do one operation each, through the proxy."""
        raise NotImplementedError

    def quiet(self):
        """Waits until nothing but the clients writes."""

    # Definitions that change while the target follows; `None` for none.
    maintenance = None

    def end(self):
        """Ends what the schema has started."""


def rights_sorted(lines):
    """The same lines with those about rights on a database in order."""
    is_right = [bool(re.match(r"(GRANT|REVOKE) .* ON DATABASE ", line)) for line in lines]
    rights = iter(sorted(line for line, right in zip(lines, is_right) if right))
    return [next(rights) if right else line for line, right in zip(lines, is_right)]


class Trial:
    def __init__(self, schema):
        self.schema, self.notes, self.differences, self.errors = schema, [], [], []
        self.refusals, self.gaps, self.pauses, self.load = [], {}, [], None

    def say(self, text):
        print(f"[{time.strftime('%H:%M:%S')}] {self.schema.name}: {text}", file=sys.stderr, flush=True)

    def fault(self, text):
        self.say(f"FAULT: {text}")
        self.errors.append(text)

    def differ(self, when, found):
        for one in found:
            self.say(f"DIFFERS {when}: {one}")
            self.differences.append(f"{when}: {one}")

    def go(self):
        schema = self.schema
        stage = self.stage = Stage(schema.name, schema.settings, schema.settings_new, schema.database)
        try:
            self.say("preparing")
            schema.prepare(stage)
            schema.prepare_target(stage)
            stage.start_proxy()
            self.objects = stage.objects(stage.old)
            self.say(self.objects)
            self.check()
            self.move()
        except Failed as failed:
            self.fault(str(failed))
        finally:
            if self.load:
                self.load.stop()
            schema.end()
            stage.close()
        return self

    def check(self):
        code, events, complaints = self.stage.tool("check", *self.schema.check_words)
        findings = [finding for event in events for finding in event.get("findings", [])]
        self.refusals = [f"{f['kind']} {f['name']}: {f['note']}" for f in findings if f["verdict"] == "refused"]
        self.checked = f"{len(findings)} findings"
        for refusal in self.refusals:
            self.say(f"REFUSED {refusal}")
        if code not in (0, 3):
            raise Failed(f"check ended with {code}: {complaints}")
        if (code == 3) != bool(self.refusals):
            self.fault(f"check ended with {code}, and has {len(self.refusals)} refusals: {complaints}")

    def tool(self, name, *words):
        """Runs a command of the tool under load, and keeps the longest wait of its clients."""
        self.say(" ".join(words))
        begun, errors = time.monotonic(), len(self.load.errors)
        code, events, complaints = self.stage.tool(*words)
        time.sleep(SETTLE_S)
        self.gaps[name] = self.load.longest(begun, time.monotonic())
        pauses = [event["paused_us"] / 1000 for event in events if "paused_us" in event]
        self.say(f"{name}: {code} in {time.monotonic() - begun:.0f} s, longest {self.gaps[name]:.0f} ms, paused {pauses}")
        self.pauses += pauses[:1]
        for _, error in self.load.errors[errors:][:5]:
            self.say(f"client: {error}")
        if code != 0:
            raise Failed(f"{name}: {' '.join(words)} ended with {code}: {complaints[-1500:]}")

    def compare(self, when, before, after, finished=True):
        """Until `finish`, the plan says, tables without keys have another replica identity, and there are publications of the tool."""
        for what in before:
            now = after[what]
            if what == "schema":
                # The order of a database's rights is that in which they were granted; the fence grants CONNECT again.
                before = {**before, what: rights_sorted(before[what])}
                now = rights_sorted(now)
            if not finished and what == "schema":
                now = [line for line in now if not (line.endswith(" REPLICA IDENTITY FULL;") and line not in before[what]) and
                       not re.match(r"(CREATE|ALTER) PUBLICATION stillpoint_", line)]
            self.differ(f"{when}, {what}", differences(before[what], now))

    def of(self, server, *what):
        return {name: getattr(self.stage, name)(server) for name in what}

    def move(self):
        stage, schema = self.stage, self.schema
        old, new = stage.old, stage.new
        definitions, reference = self.of(old, "schema", "roles"), stage.reference(schema.reference_edits)
        self.load = Load(schema.clients(stage), schema.think_s)
        time.sleep(SETTLE_S)
        begun = time.monotonic()
        time.sleep(2 * SETTLE_S)
        self.usual = self.load.longest(begun, time.monotonic())
        if not self.load.count():
            raise Failed("clients get no answer")

        self.tool("there", "run", *RUN_WORDS, *schema.run_words)
        self.quiet()
        self.compare("after run", reference, self.of(new, "schema", "roles"), finished=False)
        self.load.resume()
        time.sleep(SETTLE_S)
        self.tool("back", "fallback", *FALLBACK_WORDS)

        if schema.maintenance:
            self.change_definitions(schema.maintenance)
            definitions, reference = self.of(old, "schema", "roles"), stage.reference(schema.reference_edits)

        holding = self.hold()
        self.quiet()
        before = {**self.of(old, "data"), **reference}
        code, _, complaints = stage.tool("switch")
        if code != 0 or holding.wait(120) != 0:
            raise Failed(f"switch ended with {code}, run with {holding.poll()}: {complaints}")
        self.compare("after switch", before, self.of(new, "schema", "data", "roles"), finished=False)
        self.rows = sum(len(rows) for rows in before["data"].values())
        self.load.resume()
        time.sleep(SETTLE_S)
        self.quiet()
        before = {**self.of(new, "data"), **definitions}
        code, _, complaints = stage.tool("fallback", *FALLBACK_WORDS)
        if code != 0:
            raise Failed(f"fallback ended with {code}: {complaints}")
        self.compare("after fallback", before, self.of(old, "schema", "data", "roles"))
        self.load.resume()
        time.sleep(SETTLE_S)
        if os.environ.get("FINISH") == "no":
            self.notes.append("run and finish were left out")
            return

        self.tool("there again", "run", *RUN_WORDS, *schema.run_words)
        code, _, complaints = stage.tool("finish")
        if code != 0:
            raise Failed(f"finish ended with {code}: {complaints}")
        self.load.quiet()
        self.compare("after finish", reference, self.of(new, "schema", "roles"))

    def quiet(self):
        self.load.quiet()
        self.schema.quiet()

    def hold(self):
        self.say("run --hold")
        holding = self.stage.start_tool("run", "--hold", *RUN_WORDS, *self.schema.run_words)
        for _ in range(1200):
            if holding.poll() is not None:
                raise Failed(f"run --hold ended with {holding.returncode}")
            if self.holds():
                return holding
            time.sleep(0.25)
        raise Failed("run --hold does not hold")

    def change_definitions(self, sql):
        """Changes definitions while the target follows, and notes what becomes of the migration."""
        holding, errors = self.hold(), len(self.load.errors)
        # Between two transactions of the clients: a foreign key of a new partition and their writes would lock each other out.
        self.load.quiet()
        self.stage.old.sql(sql, self.stage.database)
        self.load.resume()
        code, _, complaints = self.stage.tool("switch")
        if code == 0 and holding.wait(120) == 0:
            self.notes.append("definitions changed while the target followed, and moved with the database")
            code, _, complaints = self.stage.tool("fallback", *FALLBACK_WORDS)
            if code != 0:
                raise Failed(f"fallback ended with {code}: {complaints}")
            return
        ended = holding.wait(120)
        said = [line for line in open(self.stage.place / "tool.log") if line.startswith("error: ")][-1].strip()
        self.notes.append(f"definitions changed while the target followed: run ended with {ended}, clients stayed ({said[:300]})")
        self.say(self.notes[-1])
        if ended not in (1, 4) or len(self.load.errors) > errors:
            self.fault(f"run ended with {ended}, clients had {len(self.load.errors) - errors} errors")

    def holds(self):
        code, events, _ = self.stage.tool("status")
        return code == 0 and any(event.get("holding") for event in events)
