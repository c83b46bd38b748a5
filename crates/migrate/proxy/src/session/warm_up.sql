WITH t AS (SELECT c.oid, c.relpages, c.oid::pg_catalog.regclass::pg_catalog.text AS name,
  (SELECT pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ')
    FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey)
    WHERE i.indrelid = c.oid AND i.indisprimary) AS key,
  (SELECT pg_catalog.min(pg_catalog.quote_ident(a.attname)) FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid
    AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND a.attidentity <> 'a') AS settable,
  EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid
    AND a.attnum > 0 AND (a.attgenerated <> '' OR a.attidentity = 'a')) AS generated
  FROM pg_catalog.pg_class c WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND c.oid >= 16384
  AND pg_catalog.has_table_privilege(c.oid, 'SELECT') ORDER BY c.relpages DESC LIMIT 30),
look (oid, place) AS (SELECT oid, CASE WHEN key IS NULL THEN '' ELSE
  pg_catalog.format(' WHERE ROW(%1$s) = (SELECT %1$s FROM %2$s LIMIT 1)', key, name) END FROM t)
SELECT CASE WHEN pg_catalog.has_table_privilege(oid, 'UPDATE') AND settable IS NOT NULL
  THEN pg_catalog.format('EXPLAIN UPDATE %1$s SET %2$s = %2$s%3$s', name, settable, place)
  ELSE pg_catalog.format('EXPLAIN SELECT * FROM %s%s', name, place) END FROM t JOIN look USING (oid)
UNION ALL SELECT pg_catalog.format('EXPLAIN INSERT INTO %1$s SELECT * FROM %1$s', name) FROM t
  WHERE NOT generated AND pg_catalog.has_table_privilege(oid, 'INSERT')
