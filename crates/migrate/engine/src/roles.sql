WITH RECURSIVE here AS (SELECT oid, datdba FROM pg_database WHERE datname = {database}),
named (oid) AS (SELECT s.refobjid FROM pg_shdepend s, here WHERE s.refclassid = 'pg_authid'::regclass
  AND (s.dbid = here.oid OR s.dbid = 0 AND s.classid = 'pg_database'::regclass AND s.objid = here.oid)
  UNION SELECT datdba FROM here
  UNION SELECT d.setrole FROM pg_db_role_setting d, here WHERE d.setdatabase = here.oid AND d.setrole <> 0),
connects (oid) AS (SELECT r.oid FROM {readable} r, here WHERE r.rolcanlogin
  AND has_database_privilege(r.oid, here.oid, 'CONNECT')),
goes (oid) AS (SELECT oid FROM named
  UNION SELECT r.oid FROM {readable} r JOIN connects USING (oid) WHERE NOT r.rolsuper
  UNION SELECT m.roleid FROM pg_auth_members m JOIN goes ON goes.oid = m.member)
SELECT r.rolname, concat_ws(' ',
  CASE WHEN r.rolsuper THEN 'SUPERUSER' ELSE 'NOSUPERUSER' END,
  CASE WHEN r.rolinherit THEN 'INHERIT' ELSE 'NOINHERIT' END,
  CASE WHEN r.rolcreaterole THEN 'CREATEROLE' ELSE 'NOCREATEROLE' END,
  CASE WHEN r.rolcreatedb THEN 'CREATEDB' ELSE 'NOCREATEDB' END,
  CASE WHEN r.rolcanlogin THEN 'LOGIN' ELSE 'NOLOGIN' END,
  CASE WHEN r.rolreplication THEN 'REPLICATION' ELSE 'NOREPLICATION' END,
  CASE WHEN r.rolbypassrls THEN 'BYPASSRLS' ELSE 'NOBYPASSRLS' END), r.rolconnlimit,
  coalesce(r.rolvaliduntil, '{expiry}'), {password},
  (SELECT coalesce(json_agg(x ORDER BY x.role), '[]') FROM (SELECT g.rolname AS role, bool_or(m.admin_option)
  AS admin, bool_or((to_jsonb(m) ->> 'inherit_option')::bool) AS inherits,
  bool_or((to_jsonb(m) ->> 'set_option')::bool) AS may_set FROM pg_auth_members m JOIN {readable} g ON g.oid =
  m.roleid WHERE m.member = r.oid GROUP BY g.rolname) x),
  (SELECT coalesce(json_agg(s ORDER BY n), '[]') FROM pg_db_role_setting d, unnest(d.setconfig) WITH ORDINALITY u (s, n)
  WHERE d.setrole = r.oid AND d.setdatabase = 0), shobj_description(r.oid, 'pg_authid'),
  r.oid IN (SELECT oid FROM named), r.oid IN (SELECT oid FROM goes), r.oid IN (SELECT oid FROM connects)
  FROM {readable} r WHERE r.rolname !~ '^pg_' ORDER BY 1
