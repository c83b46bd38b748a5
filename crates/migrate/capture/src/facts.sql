SELECT 'set', pg_catalog.current_setting('extra_float_digits'), pg_catalog.current_setting('track_counts'),
  pg_catalog.getdatabaseencoding()::text, NULL::text, NULL::text, NULL::text, NULL::text
UNION ALL SELECT 'said', pg_catalog.string_agg(pg_catalog.format('pg_catalog.set_config(%L, %L, false)', s.name,
  coalesce(s.value, pg_catalog.current_setting(s.name))), ', ' ORDER BY s.name), CURRENT_USER::text, NULL, NULL,
  NULL, NULL, NULL FROM (SELECT name, NULL::text AS value FROM pg_catalog.unnest({MEANING_SETTINGS}::text[]) name
UNION ALL SELECT 'search_path', pg_catalog.array_to_string(ARRAY(SELECT pg_catalog.quote_ident(x.s)
  FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) WITH ORDINALITY x(s, p) ORDER BY p), ', ')) s
UNION ALL SELECT 'path', s, p::text, NULL, NULL, NULL, NULL, NULL
  FROM pg_catalog.unnest(pg_catalog.current_schemas(true)) WITH ORDINALITY x(s, p)
UNION ALL SELECT 'table', c.oid::text, n.nspname, c.relname, CASE WHEN c.relispartition THEN 'partition' ELSE
  CASE c.relkind WHEN 'v' THEN 'view' WHEN 'm' THEN 'materialized view'
  WHEN 'f' THEN 'foreign table' END END, (c.relpersistence = 't')::text, CASE
  WHEN NOT pg_catalog.has_table_privilege(c.oid, 'SELECT') THEN 'no SELECT right'
  WHEN pg_catalog.row_security_active(c.oid) THEN 'row security' WHEN c.relkind = 'r' AND EXISTS (SELECT FROM
  pg_catalog.pg_inherits h WHERE h.inhparent = c.oid) THEN 'other tables inherit from it'
  WHEN EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT
  a.attisdropped AND a.atttypid = 790) THEN 'the text of money depends on the session' END, c.relkind::text
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND {user}
UNION ALL SELECT 'column', a.attrelid::text, a.attnum::text, a.attname, (a.attgenerated <> '')::text, (a.attidentity
  = 'a')::text, (a.attidentity <> '' OR a.attgenerated = '' AND coalesce(( SELECT pg_catalog.pg_get_expr(d.adbin,
  d.adrelid) ~ '[(]|CURRENT_|LOCALTIME|_USER' FROM pg_catalog.pg_attrdef d
  WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum), false))::text, NULL
  FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE a.attnum > 0 AND NOT a.attisdropped AND c.relkind
  IN ('r', 'p') AND {user}
UNION ALL SELECT 'index', i.indrelid::text, i.indexrelid::text, i.indkey::text, i.indnkeyatts::text,
  CASE WHEN NOT i.indimmediate THEN 'deferrable' WHEN i.indisexclusion OR i.indexprs IS NOT NULL THEN 'expression'
  WHEN EXISTS (SELECT FROM pg_catalog.unnest(i.indclass) k JOIN pg_catalog.pg_opclass o ON o.oid = k
  WHERE NOT o.opcdefault) THEN 'operators' WHEN EXISTS (SELECT FROM pg_catalog.unnest(i.indcollation) k
  JOIN pg_catalog.pg_collation o ON o.oid = k WHERE NOT o.collisdeterministic) THEN 'collation'
  WHEN EXISTS (SELECT FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type y ON y.oid = a.atttypid
  WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey) AND NOT (y.typtype = 'e' OR {own} OR y.typcategory =
  'A' AND {element})) THEN 'type' ELSE '' END, (i.indisprimary OR i.indisreplident)::text,
  coalesce(pg_catalog.to_jsonb(i) ->> 'indnullsnotdistinct', 'false')
  FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indrelid JOIN pg_catalog.pg_namespace n ON
  n.oid = c.relnamespace WHERE (i.indisunique OR i.indisexclusion) AND {user}
UNION ALL SELECT 'reference', k.conrelid::text, k.confrelid::text, k.conindid::text,
  pg_catalog.array_to_string(k.conkey, ' '), k.conname, (k.confupdtype IN ('c', 'n', 'd'))::text, (k.confdeltype IN
  ('c', 'n', 'd'))::text FROM pg_catalog.pg_constraint k WHERE k.contype = 'f'
UNION ALL SELECT 'more', t.tgrelid::text, 'trigger ' || t.tgname, (t.tgtype & 4 <> 0)::text, (t.tgtype & 16 <>
  0)::text, (t.tgtype & 8 <> 0)::text, NULL, NULL FROM pg_catalog.pg_trigger t
  WHERE NOT t.tgisinternal AND t.tgenabled <> 'D'
UNION ALL SELECT 'more', r.ev_class::text, 'rule ' || r.rulename, (r.ev_type = '3')::text, (r.ev_type = '2')::text,
  (r.ev_type = '4')::text, NULL, NULL FROM pg_catalog.pg_rewrite r WHERE r.ev_type <> '1'
UNION ALL SELECT 'deferrable', k.conname, NULL, NULL, NULL, NULL, NULL, NULL
  FROM pg_catalog.pg_constraint k WHERE k.condeferrable
UNION ALL SELECT 'function', p.proname, NULL, NULL, NULL, NULL, NULL, NULL
  FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
  WHERE p.provolatile = 'v' AND p.prokind <> 'p' AND {user}
UNION ALL SELECT 'function', f, NULL, NULL, NULL, NULL, NULL, NULL
  FROM pg_catalog.unnest({WRITING_FUNCTIONS}::text[]) f
UNION ALL SELECT 'statement', s.name, s.statement, pg_catalog.array_to_string(s.parameter_types::pg_catalog.oid[],
  ' '), NULL, NULL, NULL, NULL FROM pg_catalog.pg_prepared_statements s
  WHERE NOT s.from_sql AND s.name !~ '^stillpoint_'
