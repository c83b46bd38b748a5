"""One database with the objects that tools for moving databases stumble over, and a queue of PgQ."""

import random

import psycopg

from trial import Schema

ROLES = """
    CREATE ROLE owner_of_all; CREATE ROLE keeper NOLOGIN CREATEROLE; CREATE ROLE reader; CREATE ROLE clerk LOGIN CONNECTION LIMIT 20;
    GRANT reader TO clerk WITH ADMIN OPTION; GRANT keeper TO owner_of_all;
    ALTER ROLE clerk SET statement_timeout = '1min'; COMMENT ON ROLE clerk IS 'the counter''s';
    CREATE DATABASE app OWNER owner_of_all; COMMENT ON DATABASE app IS 'all of it';
    ALTER DATABASE app SET work_mem = '8MB'; ALTER DATABASE app SET search_path = 'public', 'shop', 'Odd Schema';
    ALTER ROLE clerk IN DATABASE app SET application_name = 'counter'; ALTER DATABASE app CONNECTION LIMIT 150;
    GRANT CREATE, TEMPORARY ON DATABASE app TO keeper; REVOKE TEMPORARY ON DATABASE app FROM PUBLIC;"""

DEFINITIONS = r"""
    CREATE EXTENSION pgq; CREATE EXTENSION citext; CREATE EXTENSION hstore; CREATE EXTENSION ltree; CREATE EXTENSION pg_trgm;
    CREATE EXTENSION btree_gist; CREATE EXTENSION btree_gin; CREATE EXTENSION unaccent; CREATE EXTENSION pgcrypto;
    CREATE EXTENSION "uuid-ossp"; CREATE EXTENSION lo; CREATE EXTENSION intarray; CREATE EXTENSION cube; CREATE EXTENSION earthdistance;
    CREATE EXTENSION isn; CREATE EXTENSION seg; CREATE EXTENSION tablefunc; CREATE EXTENSION postgres_fdw; CREATE EXTENSION file_fdw;
    CREATE EXTENSION pg_stat_statements; CREATE EXTENSION ip4r; CREATE EXTENSION hll; CREATE EXTENSION orafce; CREATE EXTENSION rum;
    CREATE EXTENSION periods; CREATE EXTENSION prefix; CREATE EXTENSION semver;
    CREATE EXTENSION plpython3u; CREATE EXTENSION plperl; CREATE EXTENSION amcheck; CREATE EXTENSION bloom; CREATE EXTENSION dict_xsyn;
    CREATE SCHEMA shop AUTHORIZATION owner_of_all; CREATE SCHEMA "Odd Schema" AUTHORIZATION owner_of_all;
    SET ROLE owner_of_all; SET search_path = shop, public;
    CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
    CREATE COLLATION german (provider = icu, locale = 'de-DE-u-co-phonebk');
    CREATE DOMAIN price AS numeric(12, 2) DEFAULT 0 CONSTRAINT positive CHECK (VALUE >= 0);
    CREATE TYPE mood AS ENUM ('sad', 'ok'); ALTER TYPE mood ADD VALUE 'curious' BEFORE 'ok';
    CREATE TYPE address AS (street text, number int, town citext);
    CREATE DOMAIN home AS address CHECK ((VALUE).number > 0);
    CREATE TYPE floatrange AS RANGE (subtype = float8, subtype_diff = float8mi, multirange_type_name = floats);
    CREATE SEQUENCE numbers AS smallint INCREMENT -3 MINVALUE -30000 MAXVALUE -1 START -1 CACHE 7 CYCLE;
    CREATE FUNCTION tax(price) RETURNS numeric IMMUTABLE STRICT PARALLEL SAFE RETURN $1 * 0.19;
    CREATE FUNCTION norm(text) RETURNS text IMMUTABLE LANGUAGE sql SET search_path = public, pg_catalog AS $$ SELECT lower(unaccent('unaccent', $1)) $$;
    CREATE TABLE customers (id bigint GENERATED ALWAYS AS IDENTITY (START 1000 INCREMENT 5) PRIMARY KEY, email citext UNIQUE, name text COLLATE blind,
      gone int, at home, feelings mood[] DEFAULT '{ok}', attributes hstore, path ltree, ranges floats, phone prefix_range, host ip4r,
      semantic semver, visitors hll DEFAULT hll_empty(), born date, picture lo,
      search tsvector GENERATED ALWAYS AS (to_tsvector('simple', coalesce(name, '') || ' ' || norm('x'))) STORED,
      made timestamptz NOT NULL DEFAULT now(), xmlish xml, inbox point, CONSTRAINT grown CHECK (born < '2020-01-01') NOT VALID);
    ALTER TABLE customers DROP COLUMN gone;
    ALTER TABLE customers ALTER name SET STATISTICS 500, ALTER attributes SET STORAGE EXTERNAL, ALTER xmlish SET COMPRESSION lz4,
      ALTER path SET (n_distinct = 40), SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, toast.autovacuum_enabled = false);
    CREATE INDEX "by Name" ON customers (lower(email::text) text_pattern_ops DESC NULLS LAST) INCLUDE (born) WHERE born IS NOT NULL;
    CREATE INDEX ON customers USING gin (search); CREATE INDEX ON customers USING gist (path); CREATE INDEX ON customers USING gist (inbox);
    CREATE INDEX ON customers USING rum (search rum_tsvector_ops); CREATE INDEX ON customers USING gin ((attributes) , feelings);
    CREATE INDEX ON customers USING bloom ((id::int), (name::text)); CREATE UNIQUE INDEX ON customers (phone, host) NULLS NOT DISTINCT WHERE phone IS NOT NULL;
    ALTER TABLE customers CLUSTER ON customers_pkey;
    CREATE STATISTICS together (dependencies, ndistinct, mcv) ON born, made FROM customers; CREATE STATISTICS of_email ON (lower(email::text)) FROM customers;
    ALTER STATISTICS together SET STATISTICS 300;
    CREATE TABLE orders (id bigserial, customer bigint NOT NULL REFERENCES customers ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED, total price,
      note text, placed timestamptz NOT NULL DEFAULT clock_timestamp(), parent bigint, state mood DEFAULT 'ok', PRIMARY KEY (id, placed))
      PARTITION BY RANGE (placed);
    CREATE TABLE orders_old PARTITION OF orders FOR VALUES FROM (MINVALUE) TO ('2026-01-01') PARTITION BY HASH (id);
    CREATE TABLE orders_old_even PARTITION OF orders_old FOR VALUES WITH (MODULUS 2, REMAINDER 0); CREATE TABLE orders_old_odd PARTITION OF orders_old FOR VALUES WITH (MODULUS 2, REMAINDER 1);
    CREATE TABLE orders_new (surplus int, note text, state mood DEFAULT 'ok', total price, placed timestamptz NOT NULL DEFAULT clock_timestamp(),
      customer bigint NOT NULL, id bigint NOT NULL, parent bigint, extra text);
    ALTER TABLE orders_new DROP COLUMN surplus, DROP COLUMN extra;
    ALTER TABLE orders ATTACH PARTITION orders_new FOR VALUES FROM ('2026-01-01') TO (MAXVALUE);
    CREATE INDEX ON orders (customer, total); CREATE UNIQUE INDEX ON orders_new (id) WHERE parent IS NULL;
    CREATE TABLE items (order_id bigint, placed timestamptz, line int, sku text, price price, taxed numeric GENERATED ALWAYS AS (tax(price)) STORED,
      PRIMARY KEY (order_id, placed, line), FOREIGN KEY (order_id, placed) REFERENCES orders MATCH FULL ON UPDATE CASCADE ON DELETE CASCADE);
    CREATE TABLE tree (id int PRIMARY KEY, parent int REFERENCES tree DEFERRABLE, favourite int, name varchar(40) COLLATE german);
    CREATE TABLE leaves (id int PRIMARY KEY, tree int REFERENCES tree ON DELETE SET NULL (tree), UNIQUE (id, tree) DEFERRABLE);
    ALTER TABLE tree ADD FOREIGN KEY (favourite) REFERENCES leaves INITIALLY DEFERRED DEFERRABLE;
    CREATE TABLE living (id int, name text, CHECK (id <> 13) NO INHERIT); CREATE TABLE animals (legs int DEFAULT 4) INHERITS (living);
    CREATE TABLE birds (wings int, name text NOT NULL) INHERITS (animals); ALTER TABLE animals ADD PRIMARY KEY (id);
    CREATE TABLE of_type OF address (street WITH OPTIONS PRIMARY KEY, number DEFAULT 1);
    CREATE TABLE nothing (); CREATE TABLE generated (n int GENERATED ALWAYS AS (1 + 1) STORED);
    CREATE TABLE keyless (what text, at timestamptz DEFAULT now()); CREATE TABLE identity_by_index (a int NOT NULL, b text);
    CREATE UNIQUE INDEX by_a ON identity_by_index (a); ALTER TABLE identity_by_index REPLICA IDENTITY USING INDEX by_a;
    CREATE TABLE rooms (room int, during tstzrange, EXCLUDE USING gist (room WITH =, during WITH &&) DEFERRABLE);
    CREATE TABLE "Odd Schema"."Odd ""table"" é" ("select" int PRIMARY KEY, "a.b" text DEFAULT E'\\x\'y', "Ünï" text[], "%s" jsonb);
    CREATE TABLE settings (name text PRIMARY KEY, of regclass, by regrole, kind regtype, code regprocedure);
    INSERT INTO settings VALUES ('customers', 'shop.customers', 'clerk', 'shop.mood', 'shop.norm(text)');
    CREATE TABLE log (at timestamptz DEFAULT now(), by text DEFAULT current_user, what text, old jsonb);
    CREATE VIEW rich AS SELECT c.id, c.name, sum(o.total) AS total FROM customers c JOIN orders o ON o.customer = c.id GROUP BY c.id WITH NO DATA;
"""
DEFINITIONS = DEFINITIONS.replace(" GROUP BY c.id WITH NO DATA", " GROUP BY c.id") + r"""
    CREATE VIEW open_orders WITH (security_barrier) AS SELECT * FROM orders WHERE state <> 'sad' WITH LOCAL CHECK OPTION;
    CREATE VIEW own WITH (security_invoker = true) AS SELECT * FROM customers WHERE name = current_user;
    CREATE RECURSIVE VIEW up (id, depth) AS SELECT id, 0 FROM tree WHERE parent IS NULL UNION ALL SELECT t.id, depth + 1 FROM tree t JOIN up u ON t.parent = u.id;
    CREATE MATERIALIZED VIEW sums AS SELECT customer, sum(total) FROM orders GROUP BY 1; CREATE UNIQUE INDEX ON sums (customer);
    CREATE MATERIALIZED VIEW top AS SELECT * FROM sums ORDER BY 2 DESC LIMIT 5; CREATE MATERIALIZED VIEW never AS SELECT * FROM top WITH NO DATA;
    CREATE FUNCTION count_up() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN INSERT INTO shop.log (what, old) VALUES (TG_OP || ' ' ||
      TG_TABLE_NAME, to_jsonb(OLD)); RETURN NULL; END $$;
    CREATE FUNCTION many() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO shop.log (what) SELECT 'many ' || count(*) FROM made; RETURN NULL; END $$;
    CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.note := coalesce(NEW.note, '') || '+'; RETURN NEW; END $$;
    CREATE TRIGGER logged AFTER UPDATE OF total OR DELETE ON orders FOR EACH ROW EXECUTE FUNCTION count_up();
    CREATE TRIGGER stamped BEFORE INSERT ON orders FOR EACH ROW WHEN (NEW.total > 50) EXECUTE FUNCTION stamp();
    CREATE TRIGGER counted AFTER INSERT ON items REFERENCING NEW TABLE AS made FOR EACH STATEMENT EXECUTE FUNCTION many();
    CREATE CONSTRAINT TRIGGER late AFTER INSERT ON tree DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION count_up();
    CREATE TRIGGER always AFTER INSERT ON keyless FOR EACH ROW EXECUTE FUNCTION count_up(); ALTER TABLE keyless ENABLE ALWAYS TRIGGER always;
    CREATE TRIGGER replica AFTER INSERT ON leaves FOR EACH ROW EXECUTE FUNCTION count_up(); ALTER TABLE leaves ENABLE REPLICA TRIGGER replica;
    ALTER TABLE orders_old DISABLE TRIGGER logged;
    CREATE VIEW to_write AS SELECT id, name FROM tree; CREATE FUNCTION write_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO shop.tree
      (id, name) VALUES (NEW.id, NEW.name); RETURN NEW; END $$;
    CREATE TRIGGER instead INSTEAD OF INSERT ON to_write FOR EACH ROW EXECUTE FUNCTION write_it();
    CREATE RULE no_delete AS ON DELETE TO settings DO INSTEAD NOTHING; CREATE RULE also AS ON INSERT TO of_type DO ALSO INSERT INTO shop.log (what)
      VALUES ('typed ' || NEW.street);
    ALTER TABLE customers ENABLE ROW LEVEL SECURITY; ALTER TABLE customers FORCE ROW LEVEL SECURITY;
    CREATE POLICY by_owner ON customers TO owner_of_all USING (true) WITH CHECK (true);
    CREATE POLICY by_clerk ON customers AS RESTRICTIVE FOR SELECT TO clerk, reader USING (name <> current_setting('app.hidden', true));
    CREATE PROCEDURE tidy(INOUT n int DEFAULT 0) LANGUAGE plpgsql AS $$ BEGIN DELETE FROM shop.log WHERE at < now() - interval '1 day'; GET DIAGNOSTICS n = ROW_COUNT; COMMIT; END $$;
    CREATE FUNCTION whole(customers) RETURNS text LANGUAGE sql STABLE AS $$ SELECT $1.name || ' <' || $1.email || '>' $$;
    CREATE FUNCTION variadic_one(VARIADIC a anyarray, OUT first anyelement) LANGUAGE sql IMMUTABLE AS $$ SELECT a[1] $$;
    CREATE AGGREGATE product (numeric) (SFUNC = numeric_mul, STYPE = numeric, INITCOND = 1, PARALLEL = SAFE, COMBINEFUNC = numeric_mul);
    CREATE FUNCTION nearly(float8, float8) RETURNS boolean IMMUTABLE RETURN abs($1 - $2) < 0.01;
    CREATE OPERATOR =~= (LEFTARG = float8, RIGHTARG = float8, FUNCTION = nearly, COMMUTATOR = =~=);
    CREATE TEXT SEARCH DICTIONARY simple_dict (TEMPLATE = simple, STOPWORDS = english); CREATE TEXT SEARCH CONFIGURATION mine (COPY = english);
    ALTER TEXT SEARCH CONFIGURATION mine ALTER MAPPING FOR asciiword WITH unaccent, simple_dict;
    CREATE INDEX ON tree USING gin (to_tsvector('shop.mine', name));
    RESET ROLE;
    CREATE FUNCTION shop.py(text) RETURNS text LANGUAGE plpython3u AS $$ return args[0][::-1] $$; CREATE FUNCTION shop.pl(text) RETURNS text LANGUAGE plperl AS $$ return uc $_[0]; $$;
    CREATE CAST (shop.address AS text) WITH INOUT; CREATE CAST (int AS shop.mood) WITH FUNCTION shop.of_number(int) AS ASSIGNMENT;
    CREATE OPERATOR CLASS shop.backwards FOR TYPE int USING btree AS OPERATOR 1 >, OPERATOR 2 >=, OPERATOR 3 =, OPERATOR 4 <=, OPERATOR 5 <, FUNCTION 1 shop.compare(int, int);
    CREATE INDEX ON shop.tree (favourite shop.backwards);
    CREATE CONVERSION shop.conv FOR 'LATIN1' TO 'UTF8' FROM iso8859_1_to_utf8;
    CREATE SERVER elsewhere FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '127.0.0.1', port '1', dbname 'x'); CREATE SERVER files FOREIGN DATA WRAPPER file_fdw;
    CREATE USER MAPPING FOR clerk SERVER elsewhere OPTIONS (user 'clerk', password 'secret word'); CREATE USER MAPPING FOR PUBLIC SERVER elsewhere;
    CREATE FOREIGN TABLE shop.remote (id int OPTIONS (column_name 'number') NOT NULL, v text) SERVER elsewhere OPTIONS (table_name 'them');
    CREATE FOREIGN TABLE shop.passwd (line text) SERVER files OPTIONS (filename '/etc/passwd');
    CREATE PUBLICATION for_search FOR TABLE shop.customers (id, email) WHERE (id > 1010), shop.tree WITH (publish = 'insert,update');
    CREATE PUBLICATION of_schema FOR TABLES IN SCHEMA "Odd Schema";
    CREATE FUNCTION shop.watch() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO shop.log (what) VALUES (tg_tag); END $$;
    CREATE EVENT TRIGGER watching ON ddl_command_end WHEN TAG IN ('CREATE TABLE', 'DROP TABLE') EXECUTE FUNCTION shop.watch();
    GRANT USAGE ON SCHEMA shop TO reader WITH GRANT OPTION; GRANT SELECT ON ALL TABLES IN SCHEMA shop TO reader; GRANT UPDATE (name, born) ON shop.customers TO clerk;
    GRANT USAGE ON SEQUENCE shop.numbers TO clerk; REVOKE EXECUTE ON FUNCTION shop.py(text) FROM PUBLIC; GRANT EXECUTE ON FUNCTION shop.py(text) TO clerk;
    GRANT USAGE ON TYPE shop.mood TO clerk; REVOKE USAGE ON TYPE shop.price FROM PUBLIC; GRANT USAGE ON FOREIGN SERVER elsewhere TO keeper;
    SET ROLE reader; GRANT USAGE ON SCHEMA shop TO clerk; RESET ROLE;
    ALTER DEFAULT PRIVILEGES FOR ROLE owner_of_all IN SCHEMA shop GRANT SELECT ON TABLES TO clerk; ALTER DEFAULT PRIVILEGES FOR ROLE keeper REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
    GRANT SELECT ON pg_stat_statements TO reader; REVOKE EXECUTE ON FUNCTION hstore(text, text) FROM PUBLIC; GRANT EXECUTE ON FUNCTION pg_read_file(text) TO keeper;
    GRANT SELECT (rolname) ON pg_authid TO keeper; REVOKE ALL ON SCHEMA public FROM PUBLIC; GRANT ALL ON SCHEMA public TO keeper;
    COMMENT ON TABLE shop.customers IS E'they \\ ''pay'''; COMMENT ON COLUMN shop.customers.name IS 'by which they go'; COMMENT ON INDEX shop."by Name" IS 'for lists';
    COMMENT ON CONSTRAINT positive ON DOMAIN shop.price IS 'no gifts'; COMMENT ON TRIGGER logged ON shop.orders IS 'kept'; COMMENT ON EXTENSION citext IS 'changed';
    COMMENT ON SCHEMA public IS 'the common one'; COMMENT ON POLICY by_clerk ON shop.customers IS 'hidden'; COMMENT ON EVENT TRIGGER watching IS 'logs';
    ALTER EXTENSION hstore ADD FUNCTION shop.variadic_one(anyarray);
    SELECT pgq.create_queue('sales'), pgq.register_consumer('sales', 'ledger');
    CREATE TRIGGER kept BEFORE UPDATE OR DELETE ON shop.customers FOR EACH ROW EXECUTE FUNCTION lo_manage(picture);
    CREATE TRIGGER to_queue AFTER INSERT OR UPDATE OR DELETE ON shop.leaves FOR EACH ROW EXECUTE FUNCTION pgq.logutriga('sales');
    CREATE TABLE shop.history (id int PRIMARY KEY, what text); SELECT periods.add_system_time_period('shop.history'); SELECT periods.add_system_versioning('shop.history');
    CREATE TABLE shop.validity (id int, valid_from date, valid_to date, what text); SELECT periods.add_period('shop.validity', 'validity', 'valid_from', 'valid_to');
    SELECT periods.add_unique_key('shop.validity', ARRAY['id'], 'validity', 'once');
    INSERT INTO shop.customers (email, name, at, attributes, path, ranges, phone, host, semantic, born, inbox)
      SELECT 'c' || n || '@example.org', 'name ' || n, ROW('street', n, 'Town')::shop.address, hstore('n', n::text), ('a.b' || n)::ltree, shop.floats(shop.floatrange(n, n + 1)),
      ('49' || n)::prefix_range, ('10.0.' || n / 200 || '.' || n % 200)::ip4r, (n || '.0.1')::semver,
      date '1950-01-01' + n, point(n, n) FROM generate_series(1, 1500) n;
    INSERT INTO shop.orders (customer, total, placed, state) SELECT 1000 + 5 * (n % 1500), n % 90, timestamptz '2025-06-01' + n * interval '2 hours',
      (ARRAY['sad', 'ok', 'curious', NULL])[n % 4 + 1]::shop.mood FROM generate_series(1, 4000) n;
    INSERT INTO shop.items SELECT id, placed, 1, 'sku', total FROM shop.orders; INSERT INTO shop.tree (id, parent, name) SELECT n, nullif(n / 2, 0), 'n ' || n FROM generate_series(1, 300) n;
    INSERT INTO shop.leaves SELECT n, n FROM generate_series(1, 300) n; INSERT INTO shop.birds SELECT n, 'bird', 2, 2 FROM generate_series(20, 99) n; INSERT INTO shop.generated DEFAULT VALUES;
    INSERT INTO shop.nothing DEFAULT VALUES; INSERT INTO "Odd Schema"."Odd ""table"" é" SELECT n, 'x', ARRAY['ä', NULL, '{'], '{"a": null}' FROM generate_series(1, 50) n;
    UPDATE shop.customers SET picture = lo_from_bytea(0, sha256(id::text::bytea)) WHERE id < 1200; GRANT SELECT ON LARGE OBJECT 0 TO reader;
    INSERT INTO shop.rooms SELECT n, tstzrange('2026-01-01', '2026-02-01') FROM generate_series(1, 100) n; INSERT INTO shop.keyless SELECT 'k' || n FROM generate_series(1, 200) n;
    INSERT INTO shop.history SELECT n, 'a' FROM generate_series(0, 9) n; UPDATE shop.history SET what = 'c'; INSERT INTO shop.validity VALUES (1, '2020-01-01', '2021-01-01', 'v');
    INSERT INTO shop.identity_by_index SELECT n, 'b' FROM generate_series(1, 100) n; SELECT nextval('shop.numbers'); REFRESH MATERIALIZED VIEW shop.sums; REFRESH MATERIALIZED VIEW shop.top;
    ANALYZE;
"""
DEFINITIONS = DEFINITIONS.replace("; GRANT SELECT ON LARGE OBJECT 0 TO reader", "")
DEFINITIONS = DEFINITIONS.replace("    CREATE CAST (shop.address", r"""    CREATE FUNCTION shop.of_number(int) RETURNS shop.mood IMMUTABLE RETURN (enum_range(NULL::shop.mood))[$1];
    CREATE FUNCTION shop.compare(int, int) RETURNS int IMMUTABLE STRICT RETURN btint4cmp($2, $1);
    CREATE CAST (shop.address""")


class Objects(Schema):
    name, title = "objects", "Hard objects: 30 extensions, roles, PgQ, periods, every kind of table, index, trigger and right"
    source = "postgresql-{15,17} and twelve packages of extensions"
    settings = {"shared_preload_libraries": "pg_stat_statements"}
    check_words = run_words = ["--roles", "create"]

    def prepare(self, stage):
        stage.old.sql(ROLES)
        stage.old.sql(DEFINITIONS, stage.database)

    def clients(self, stage):
        def client(seed):
            connection, rng = psycopg.connect(stage.through_proxy(), autocommit=True), random.Random(seed)
            connection.execute("SET search_path = shop, public")

            def once():
                n, kind = rng.randrange(1, 1400), rng.randrange(9)
                with connection.transaction():
                    if kind == 0:
                        row = connection.execute("INSERT INTO orders (customer, total) VALUES (%s, %s) RETURNING id, placed", [1000 + 5 * n, n % 90]).fetchone()
                        connection.execute("INSERT INTO items SELECT %s, %s, n, 'sku', 3 FROM generate_series(1, 3) n", [row[0], row[1]])
                    elif kind == 1:
                        connection.execute("UPDATE customers SET name = name || 'x', visitors = hll_add(visitors, hll_hash_integer(%s)), attributes = "
                                           "attributes || hstore('k', %s) WHERE id = %s", [n, str(n), 1000 + 5 * n])
                    elif kind == 2:
                        connection.execute("UPDATE orders SET total = total + 1 WHERE customer = %s", [1000 + 5 * n])
                        connection.execute("DELETE FROM orders WHERE id = %s", [n])
                    elif kind == 3:
                        connection.execute("INSERT INTO keyless VALUES (%s)", [str(n)])
                        connection.execute("UPDATE keyless SET what = what || '.' WHERE what = %s", [f"k{n % 200}"])
                    elif kind == 4:
                        connection.execute("UPDATE leaves SET tree = %s WHERE id = %s", [n % 300 + 1, n % 250 + 1])
                        connection.execute("SET CONSTRAINTS ALL DEFERRED")
                        connection.execute("UPDATE identity_by_index SET b = %s WHERE a = %s", [str(n), n % 100])
                    elif kind == 5:
                        connection.execute("UPDATE history SET what = %s WHERE id = %s", [str(n), seed])
                        connection.execute('UPDATE "Odd Schema"."Odd ""table"" é" SET "a.b" = %s, "Ünï" = ARRAY[%s, NULL] WHERE "select" = %s', [str(n), "ß", n % 50 + 1])
                    elif kind == 6:
                        connection.execute("UPDATE customers SET picture = lo_from_bytea(0, %s) WHERE id = %s", [str(n).encode() * 50, 1000 + 5 * (n % 100)])
                        connection.execute("INSERT INTO of_type VALUES (%s, 2, 'T') ON CONFLICT DO NOTHING" if False else "INSERT INTO log (what) VALUES (%s)", [str(n)])
                    elif kind == 7:
                        connection.execute("UPDATE birds SET wings = wings + 1 WHERE id = %s", [n % 99])
                        connection.execute("UPDATE rooms SET during = tstzrange(now(), 'infinity') WHERE room = %s", [n % 100])
                        connection.execute("INSERT INTO nothing DEFAULT VALUES")
                    else:
                        connection.execute("SELECT pgq.insert_event('sales', 'sold', %s)", [str(n)])
                        connection.execute("SELECT nextval('numbers')")
            return once
        return [client(seed) for seed in range(6)]


SCHEMA = Objects
