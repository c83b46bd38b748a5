-- Reasons why a statement with these relations ($1), functions ($2) and operators ($3) is not mirrored. Views and policies
-- are followed; the functions of the server itself are in no dependency, so they are looked for in the definitions.
WITH RECURSIVE reached (oid) AS (
  SELECT pg_catalog.to_regclass(n)::pg_catalog.oid FROM pg_catalog.unnest($1::pg_catalog.text[]) n
    WHERE pg_catalog.to_regclass(n) IS NOT NULL
  UNION
  SELECT used.oid FROM reached r, LATERAL (
    SELECT d.refobjid FROM pg_catalog.pg_rewrite w JOIN pg_catalog.pg_depend d
      ON d.classid = 'pg_catalog.pg_rewrite'::pg_catalog.regclass AND d.objid = w.oid
      WHERE w.ev_class = r.oid AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
    UNION ALL SELECT d.refobjid FROM pg_catalog.pg_policy p JOIN pg_catalog.pg_depend d
      ON d.classid = 'pg_catalog.pg_policy'::pg_catalog.regclass AND d.objid = p.oid
      WHERE p.polrelid = r.oid AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
    UNION ALL SELECT i.inhrelid FROM pg_catalog.pg_inherits i WHERE i.inhparent = r.oid
  ) used (oid)
), parts (classid, objid, definition) AS (
  SELECT 'pg_catalog.pg_rewrite'::pg_catalog.regclass, w.oid, pg_catalog.pg_get_viewdef(w.ev_class)
    FROM reached r JOIN pg_catalog.pg_rewrite w ON w.ev_class = r.oid JOIN pg_catalog.pg_class c ON c.oid = r.oid
    WHERE c.relkind = 'v'
  UNION ALL SELECT 'pg_catalog.pg_policy'::pg_catalog.regclass, p.oid, pg_catalog.pg_get_expr(p.polqual, p.polrelid)
    FROM reached r JOIN pg_catalog.pg_policy p ON p.polrelid = r.oid
), volatile (oid, name, is_builtin) AS (
  SELECT p.oid, p.proname::pg_catalog.text, p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace
    FROM pg_catalog.pg_proc p WHERE p.provolatile = 'v'
  UNION SELECT a.aggfnoid::pg_catalog.oid, p.proname::pg_catalog.text, false FROM pg_catalog.pg_aggregate a
    JOIN pg_catalog.pg_proc p ON p.oid = a.aggfnoid
    WHERE EXISTS (SELECT FROM pg_catalog.pg_proc t WHERE t.oid IN (a.aggtransfn, a.aggfinalfn) AND t.provolatile = 'v')
)
SELECT 'function ' || v.name || ', which may change something' FROM volatile v
  WHERE v.name = ANY ($2::pg_catalog.text[])
  OR EXISTS (SELECT FROM parts s JOIN pg_catalog.pg_depend d ON d.classid = s.classid AND d.objid = s.objid
    WHERE d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass AND d.refobjid = v.oid)
  OR v.is_builtin AND EXISTS (SELECT FROM parts s WHERE pg_catalog.strpos(s.definition, v.name || '(') > 0)
UNION ALL SELECT 'operator ' || o.oprname || ', which may change something' FROM pg_catalog.pg_operator o
  JOIN volatile v ON v.oid = o.oprcode WHERE o.oprname = ANY ($3::pg_catalog.text[])
  OR EXISTS (SELECT FROM parts s JOIN pg_catalog.pg_depend d ON d.classid = s.classid AND d.objid = s.objid
    WHERE d.refclassid = 'pg_catalog.pg_operator'::pg_catalog.regclass AND d.refobjid = o.oid)
UNION ALL SELECT CASE WHEN n.nspname IN ('pg_catalog', 'information_schema') THEN 'a catalog of the server'
    WHEN c.relpersistence = 't' THEN 'a temporary table' WHEN c.relkind = 'f' THEN 'a foreign table'
    ELSE 'a relation that is no table or view' END
  FROM reached r JOIN pg_catalog.pg_class c ON c.oid = r.oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname IN ('pg_catalog', 'information_schema') OR c.relpersistence = 't' OR c.relkind NOT IN ('r', 'p', 'v', 'm')
LIMIT 1
