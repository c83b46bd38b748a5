SELECT CASE source WHEN 'session' THEN 'setting' ELSE 'inherited' END, name, setting, '' FROM pg_catalog.pg_settings
  WHERE name !~ '^transaction_(isolation|read_only|deferrable)$' AND (source = 'session'
  OR source <> 'client' AND context IN ('user', 'superuser')
  AND (source IN ('global', 'database', 'user', 'database user') OR name IN ('{settings}')))
UNION ALL SELECT 'inherited', n, pg_catalog.current_setting(n, true), '' FROM (SELECT DISTINCT pg_catalog.split_part(s, '=', 1)
  FROM pg_catalog.pg_db_role_setting d, pg_catalog.unnest(d.setconfig) s
  WHERE d.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()))
  AND d.setrole IN (0, (SELECT oid FROM pg_catalog.pg_roles WHERE rolname = session_user))) p (n)
  WHERE n LIKE '%.%' AND NOT EXISTS (SELECT FROM pg_catalog.pg_settings WHERE name = n)
UNION ALL SELECT 'custom', n, pg_catalog.current_setting(n, true), '' FROM pg_catalog.unnest($1::pg_catalog.text[]) n
UNION ALL SELECT 'role', session_user::pg_catalog.text, pg_catalog.current_setting('role'), ''
UNION ALL SELECT CASE WHEN from_sql THEN 'prepare' ELSE 'parse' END, name, statement,
  pg_catalog.array_to_string(parameter_types::pg_catalog.oid[], ',') FROM pg_catalog.pg_prepared_statements
  WHERE name !~ '^stillpoint_'
UNION ALL SELECT 'listen', c, '', '' FROM pg_catalog.pg_listening_channels() c
UNION ALL SELECT 'lock', mode, pg_catalog.concat_ws(',', classid, objid, objsubid), '' FROM pg_catalog.pg_locks
  WHERE locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid() AND granted
UNION ALL SELECT 'pin', 'cursor WITH HOLD ' || name, '', '' FROM pg_catalog.pg_cursors WHERE is_holdable
UNION ALL SELECT 'pin', 'temporary relation ' || relname, '', '' FROM pg_catalog.pg_class
  WHERE relnamespace = pg_catalog.pg_my_temp_schema() AND relkind <> 'i'
UNION ALL SELECT 'pin', 'temporary function ' || proname, '', '' FROM pg_catalog.pg_proc
  WHERE pronamespace = pg_catalog.pg_my_temp_schema()
UNION ALL SELECT 'pin', 'temporary type ' || typname, '', '' FROM pg_catalog.pg_type
  WHERE typnamespace = pg_catalog.pg_my_temp_schema() AND typtype IN ('d', 'e', 'r')
