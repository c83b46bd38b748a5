// node-postgres through the proxy: parameters, prepared statements, a pool, notifications, errors, cancelling.

const assert = require("assert");
const { Client, Pool } = require("pg");

const connectionString = process.argv[2];

async function statements(client) {
  await client.query("create temp table rows (a int, b text)");
  for (let i = 0; i < 100; i++) {
    await client.query({ name: "insert", text: "insert into rows values ($1, $2)", values: [i, "x".repeat(i * 1000)] });
  }
  const { rows } = await client.query("select a, length(b) as n from rows where a >= $1 order by a", [50]);
  assert.strictEqual(rows.length, 50);
  assert.strictEqual(rows[49].n, 99000);
  // sent at once, answered in order
  const answers = await Promise.all([1, 2, 3].map((i) => client.query("select $1::int as i", [i])));
  assert.deepStrictEqual(answers.map((answer) => answer.rows[0].i), [1, 2, 3]);
  await assert.rejects(client.query("select 1/0"), { code: "22012" });
  const several = await client.query("select 1; select 2");
  assert.strictEqual(several.length, 2);
}

async function transactions() {
  const pool = new Pool({ connectionString, max: 8 });
  await pool.query("create table counter (n int)");
  await pool.query("insert into counter values (0)");
  await Promise.all(Array.from({ length: 40 }, async () => {
    const client = await pool.connect();
    await client.query("begin");
    await client.query("update counter set n = n + 1");
    await client.query("commit");
    client.release();
  }));
  assert.strictEqual((await pool.query("select n from counter")).rows[0].n, 40);
  await pool.query("drop table counter");
  await pool.end();
}

async function notifications(client) {
  const other = new Client({ connectionString });
  await other.connect();
  const heard = new Promise((resolve) => client.on("notification", (message) => resolve(message.payload)));
  await client.query("listen channel");
  await other.query("select pg_notify('channel', $1)", ["payload"]);
  assert.strictEqual(await heard, "payload");
  const { rows } = await client.query("select pg_backend_pid() as pid");
  const sleeping = client.query("select pg_sleep(60)");
  const cancelled = new Promise((resolve) => setTimeout(resolve, 200)).then(() =>
    other.query("select pg_cancel_backend($1)", [rows[0].pid]));
  await assert.rejects(sleeping, { code: "57014" });
  await cancelled;
  await other.end();
}

(async () => {
  const client = new Client({ connectionString });
  await client.connect();
  await statements(client);
  await transactions();
  await notifications(client);
  await client.end();
  console.log("node-postgres", require("pg/package.json").version, "passed");
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
