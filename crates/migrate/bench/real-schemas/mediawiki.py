"""MediaWiki of Debian's package behind PHP's web server: readers and editors by its HTTP interface."""

import http.client
import json
import os
import random
import signal
import subprocess
import time
import urllib.parse

from testbed import STATE, Failed, free_port, in_root, run
from trial import Schema


class MediaWiki(Schema):
    name, title = "mediawiki", "MediaWiki: pages edited and read over HTTP"
    source = "mediawiki 1.39 of Debian 12"
    check_words = run_words = ["--roles", "create"]
    process = None
    settings = {"password_encryption": "scram-sha-256"}

    def php(self, *words, **environment):
        return in_root(STATE / "roots" / "apps", "php", "-d", "error_reporting=0", *words, environment=environment)

    def prepare(self, stage):
        settings = STATE / "roots" / "apps" / "etc/mediawiki/LocalSettings.php"
        settings.unlink(missing_ok=True)
        stage.old.sql(f"CREATE ROLE wiki LOGIN PASSWORD 'secret'; CREATE DATABASE {stage.database} OWNER wiki")
        run(self.php("/usr/share/mediawiki/maintenance/install.php", "--dbtype=postgres", "--dbserver=127.0.0.1", f"--dbport={stage.old.port}",
                     f"--dbname={stage.database}", "--dbuser=wiki", "--dbpass=secret", "--server=http://127.0.0.1", "--scriptpath=",
                     "--confpath=/etc/mediawiki", "--pass=long password of a test", "Wiki", "Admin"))
        text = settings.read_text()
        settings.write_text(text.replace(f"{stage.old.port}", f"{stage.port}") +
                            "\n$wgMainCacheType = CACHE_DB; $wgSessionCacheType = CACHE_DB; $wgJobRunRate = 1; $wgRateLimits = [];\n")
        settings.chmod(0o644)

    def clients(self, stage):
        self.port = free_port()
        log = open(stage.place / "mediawiki.log", "w")
        self.process = subprocess.Popen(self.php("-S", f"127.0.0.1:{self.port}", "-t", "/usr/share/mediawiki", PHP_CLI_SERVER_WORKERS="6"),
                                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        for _ in range(60):
            try:
                self.ask({"action": "query", "meta": "siteinfo", "format": "json"})
                break
            except OSError:
                time.sleep(0.5)

        def client(seed):
            rng = random.Random(seed)

            def once():
                title = f"Page {rng.randrange(60)}"
                if rng.randrange(2):
                    answer = self.ask({"action": "edit", "format": "json", "title": title, "token": "+\\", "text": f"über [[Page {rng.randrange(60)}]] "
                                       f"[[Category:C{rng.randrange(9)}]] " + "word " * rng.randrange(3000)})
                    if "edit" not in answer and answer.get("error", {}).get("code") not in ("editconflict",):
                        raise Failed(str(answer)[:300])
                else:
                    answer = self.ask({"action": "query", "format": "json", "list": "search|recentchanges", "srsearch": "word", "titles": title, "prop": "links|categories"})
                    if "query" not in answer:
                        raise Failed(str(answer)[:300])
            return once
        return [client(seed) for seed in range(4)]

    def ask(self, words):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/api.php", urllib.parse.urlencode(words), {"Content-Type": "application/x-www-form-urlencoded"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200 or not text.startswith(b"{"):
            raise Failed(f"{answer.status} {text[:300]!r}")
        return json.loads(text)

    def end(self):
        if self.process:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(30)


SCHEMA = MediaWiki
