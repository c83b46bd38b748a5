"""psycopg 3 through the proxy: copies, a copy that fails, pipelines, cursors, notifications, cancelling."""

import sys
import threading

import psycopg

DSN = sys.argv[1]


def copies(connection):
    cursor = connection.cursor()
    cursor.execute("create temp table rows (a int, b text)")
    with cursor.copy("copy rows from stdin") as copy:
        for i in range(5000):
            copy.write_row((i, "x" * 50))
    with cursor.copy("copy rows to stdout") as copy:
        assert sum(1 for _ in copy.rows()) == 5000
    try:
        with cursor.copy("copy rows from stdin") as copy:
            copy.write(b"no number\tx\n")
        raise AssertionError("a row that is none was taken")
    except psycopg.errors.InvalidTextRepresentation:
        connection.rollback()


def pipelines(connection):
    cursor = connection.cursor()
    cursor.execute("create temp table rows (a int, b text)")
    cursor.executemany("insert into rows values (%s, %s)", [(i, "y") for i in range(1000)])
    assert cursor.execute("select count(*) from rows").fetchone() == (1000,)
    with connection.pipeline():
        results = [connection.execute("select %s::int", (i,), prepare=True) for i in range(100)]
    assert [result.fetchone()[0] for result in results] == list(range(100))
    with connection.cursor(name="held_by_the_server") as cursor:
        cursor.execute("select * from generate_series(1, 10000)")
        assert len(cursor.fetchall()) == 10000
    connection.commit()


def notifications_and_cancelling(connection):
    other = psycopg.connect(DSN, autocommit=True)
    other.execute("listen channel")
    connection.execute("notify channel, 'payload'")
    connection.commit()
    assert next(other.notifies(timeout=60)).payload == "payload"
    timer = threading.Timer(0.2, other.cancel)
    timer.start()
    try:
        other.execute("select pg_sleep(60)")
        raise AssertionError("the statement was not cancelled")
    except psycopg.errors.QueryCanceled:
        pass
    assert other.execute("select 1").fetchone() == (1,)
    other.close()


with psycopg.connect(DSN) as connection:
    copies(connection)
    pipelines(connection)
    notifications_and_cancelling(connection)
print("psycopg", psycopg.__version__, "passed")
