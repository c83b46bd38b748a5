"""asyncpg through the proxy: binary copies, prepared and unnamed statements, cursors, notifications, time-outs."""

import asyncio
import sys

import asyncpg

PARAMETERS = dict(host="127.0.0.1", port=int(sys.argv[1]), user="postgres", database=sys.argv[2])


async def main():
    connection = await asyncpg.connect(**PARAMETERS)
    await connection.execute("create temp table rows (a int, b text)")
    await connection.copy_records_to_table("rows", records=[(i, "z" * 20) for i in range(5000)])
    assert await connection.fetchval("select count(*) from rows") == 5000
    statement = await connection.prepare("select $1::int + 1")
    for i in range(50):
        assert await statement.fetchval(i) == i + 1
    async with connection.transaction():
        count = 0
        async for _ in connection.cursor("select * from generate_series(1, 1000)"):
            count += 1
        assert count == 1000

    heard = asyncio.get_running_loop().create_future()
    await connection.add_listener("channel", lambda *said: heard.done() or heard.set_result(said[3]))
    # without named statements: Parse and Bind come in different round trips
    unnamed = await asyncpg.connect(statement_cache_size=0, **PARAMETERS)
    await unnamed.execute("select pg_notify('channel', $1)", "payload")
    assert await asyncio.wait_for(heard, 60) == "payload"
    try:
        await asyncio.wait_for(unnamed.execute("select pg_sleep(60)"), 0.2)
        raise AssertionError("the statement was not cancelled")
    except asyncio.TimeoutError:
        pass
    assert await unnamed.fetchval("select $1::int", 2) == 2
    await unnamed.close()
    await connection.close()


asyncio.run(main())
print("asyncpg", asyncpg.__version__, "passed")
