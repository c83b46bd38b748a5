SELECT p.proname, l.lanname, p.provolatile::pg_catalog.text,
  CASE WHEN l.lanname IN ('c', 'internal') THEN ''
    WHEN l.lanname = 'sql' AND p.prosrc = '' AND p.prokind IN ('f', 'p') THEN pg_catalog.pg_get_functiondef(p.oid) ELSE p.prosrc END,
  EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass AND d.refobjid = p.oid
    AND d.classid IN ('pg_catalog.pg_trigger'::pg_catalog.regclass, 'pg_catalog.pg_attrdef'::pg_catalog.regclass)),
  EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass AND d.refobjid = p.oid
    AND d.classid NOT IN ('pg_catalog.pg_trigger'::pg_catalog.regclass, 'pg_catalog.pg_attrdef'::pg_catalog.regclass,
    'pg_catalog.pg_event_trigger'::pg_catalog.regclass))
  FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_language l ON l.oid = p.prolang JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
  WHERE n.nspname NOT IN ('pg_catalog', 'information_schema')
UNION ALL SELECT '', 'tree', 'v', p.proname, false, true FROM pg_catalog.pg_proc p
  WHERE p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace
  AND p.proname ~ '^(set_config|setseed|currval|lastval|pg_(try_)?advisory_lock(_shared)?|pg_replication_origin_session_setup)$'
  AND EXISTS (SELECT FROM (SELECT ev_action::pg_catalog.text FROM pg_catalog.pg_rewrite WHERE oid >= 16384
    UNION ALL SELECT pg_catalog.concat(polqual::pg_catalog.text, polwithcheck::pg_catalog.text) FROM pg_catalog.pg_policy
    UNION ALL SELECT adbin::pg_catalog.text FROM pg_catalog.pg_attrdef
    UNION ALL SELECT conbin::pg_catalog.text FROM pg_catalog.pg_constraint WHERE conbin IS NOT NULL) trees (tree)
    WHERE pg_catalog.strpos(tree, ':funcid ' || p.oid || ' ') > 0)
