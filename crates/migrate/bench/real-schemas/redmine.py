"""Redmine of Debian's package behind its own web server: clients open, change and list issues by its HTTP interface."""

import http.client
import json
import random
import subprocess
import time

from testbed import STATE, Failed, free_port, in_root, run
from trial import Schema


class Redmine(Schema):
    name, title = "redmine", "Redmine: issues over HTTP"
    source = "redmine 5.0.4 of Debian 12"
    check_words = run_words = ["--roles", "create"]
    process = None

    def rails(self, port, *words):
        environment = {"RAILS_ENV": "production", "REDMINE_LANG": "en", "HOME": "/root"}
        root = STATE / "roots" / "apps"
        (root / "etc/redmine/default/database.yml").write_text(
            f"production:\n  adapter: postgresql\n  database: app\n  host: 127.0.0.1\n  port: {port}\n  username: redmine\n  password: secret\n  pool: 8\n")
        return in_root(root, "sh", "-c", 'cd /usr/share/redmine && exec "$@"', "sh", *words, environment=environment)

    def prepare(self, stage):
        stage.old.sql(f"CREATE ROLE redmine LOGIN PASSWORD 'secret'; CREATE DATABASE {stage.database} OWNER redmine")
        run(self.rails(stage.old.port, "bundle", "exec", "rake", "db:migrate"))
        run(self.rails(stage.old.port, "bundle", "exec", "rake", "redmine:load_default_data"))
        stage.old.sql("""
            UPDATE settings SET value = '1' WHERE name = 'rest_api_enabled';
            INSERT INTO settings (name, value, updated_on) SELECT 'rest_api_enabled', '1', now() WHERE NOT EXISTS (SELECT FROM settings WHERE
              name = 'rest_api_enabled');
            UPDATE users SET must_change_passwd = false WHERE login = 'admin';
            INSERT INTO tokens (user_id, action, value, created_on, updated_on) SELECT id, 'api', 'key', now(), now() FROM users WHERE
              login = 'admin';""", stage.database)

    def clients(self, stage):
        self.port = free_port()
        log = open(stage.place / "redmine.log", "w")
        self.process = subprocess.Popen(self.rails(stage.port, "puma", "-e", "production", "-t", "6:6", "-b", f"tcp://127.0.0.1:{self.port}",
                                                   "config.ru"), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for _ in range(240):
            try:
                self.ask("GET", "/projects.json")
                break
            except (OSError, Failed) as why:
                last = why
                time.sleep(0.5)
        else:
            raise Failed(f"Redmine does not answer: {last}")
        project = self.ask("POST", "/projects.json", {"project": {"name": "P", "identifier": f"p{random.getrandbits(30)}", "tracker_ids": [1, 2, 3]}})
        number = project["project"]["id"]

        def client(seed):
            rng, mine = random.Random(seed), []

            def once():
                kind = rng.randrange(6)
                if kind < 2 or not mine:
                    made = self.ask("POST", "/issues.json", {"issue": {"project_id": number, "subject": f"über {seed}", "description": "x" * rng.randrange(4000),
                                                                       "priority_id": rng.randrange(1, 4), "tracker_id": 1 + rng.randrange(3)}})
                    mine.append(made["issue"]["id"])
                elif kind == 2:
                    self.ask("PUT", f"/issues/{rng.choice(mine)}.json", {"issue": {"notes": "done", "done_ratio": rng.randrange(11) * 10}})
                elif kind == 3:
                    self.ask("POST", "/time_entries.json", {"time_entry": {"issue_id": rng.choice(mine), "hours": 1.5, "activity_id": 9, "comments": "w"}},
                             allowed=(201, 422))
                elif kind == 4 and len(mine) > 5:
                    self.ask("DELETE", f"/issues/{mine.pop(0)}.json")
                else:
                    self.ask("GET", f"/issues.json?limit=25&sort=updated_on:desc&project_id={number}")
            return once
        return [client(seed) for seed in range(4)]

    def ask(self, method, path, body=None, allowed=(200, 201, 204)):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json", "X-Redmine-API-Key": "key"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status not in allowed:
            raise Failed(f"{method} {path}: {answer.status} {text[:200]!r}")
        return json.loads(text) if text.startswith(b"{") else None

    def end(self):
        if self.process:
            self.process.terminate()
            self.process.wait(60)


SCHEMA = Redmine
