"""libpq 18 through the proxy: protocol 3.2 with its long cancel keys, TLS from the first byte, sockets of this machine."""

import concurrent.futures
import sys
import time

import psycopg

port, socket_dir = sys.argv[1:]
if psycopg.pq.version() < 180000:
    print("libpq", psycopg.pq.version(), "knows neither protocol 3.2")
    sys.exit(77)

WAYS = {
    "protocol 3.0": f"host=127.0.0.1 port={port} sslmode=disable max_protocol_version=3.0",
    "protocol 3.2": f"host=127.0.0.1 port={port} sslmode=disable min_protocol_version=3.2 max_protocol_version=3.2",
    "TLS after a request": f"host=127.0.0.1 port={port} sslmode=require max_protocol_version=3.2",
    "TLS at once": f"host=127.0.0.1 port={port} sslmode=require sslnegotiation=direct min_protocol_version=3.2",
    "a socket": f"host={socket_dir} port={port} min_protocol_version=3.2",
}


def cancels(connection):
    """The request goes by a connection of its own, encrypted like this one, and carries the key that the proxy gave."""

    def later():
        time.sleep(0.2)
        connection.cancel_safe(timeout=30)

    with concurrent.futures.ThreadPoolExecutor() as executor:
        request = executor.submit(later)
        try:
            connection.execute("select pg_sleep(60)")
            raise AssertionError("the statement was not cancelled")
        except psycopg.errors.QueryCanceled:
            request.result()


for name, way in WAYS.items():
    with psycopg.connect(f"{way} user=postgres dbname=postgres", autocommit=True) as connection:
        minor = connection.pgconn.full_protocol_version if hasattr(connection.pgconn, "full_protocol_version") else None
        expected = 30000 if name == "protocol 3.0" else 30002
        assert minor in (None, expected), f"{name}: {minor}"
        assert connection.pgconn.ssl_in_use == name.startswith("TLS"), name
        assert connection.execute("select %s::int + 1", (41,)).fetchone() == (42,), name
        cancels(connection)
        assert connection.execute("select 1").fetchone() == (1,), name
print("libpq", psycopg.pq.version(), "passed:", ", ".join(WAYS))
