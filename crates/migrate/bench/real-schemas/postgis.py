"""PostGIS with geometries, geographies, rasters, a topology, the geocoder, address_standardizer and pgRouting."""

import random

import psycopg

from trial import Schema


class PostGIS(Schema):
    name, title = "postgis", "PostGIS: map with topology, raster, geocoder, routing"
    source = "postgresql-{15,17}-postgis-3, -pgrouting"
    explained = ["`topology.topology_id_seq` belongs to the configuration of the newer version of its extension only, so pg_dump writes it on one "
                 "side; its value is moved"]

    def prepare(self, stage):
        stage.old.sql(f"CREATE DATABASE {stage.database}")
        stage.old.sql("""
            CREATE EXTENSION postgis; CREATE EXTENSION postgis_raster; CREATE EXTENSION postgis_sfcgal; CREATE EXTENSION postgis_topology;
            CREATE EXTENSION fuzzystrmatch; CREATE EXTENSION address_standardizer; CREATE EXTENSION address_standardizer_data_us;
            CREATE EXTENSION postgis_tiger_geocoder; CREATE EXTENSION pgrouting CASCADE;
            -- a reference system of one's own
            INSERT INTO spatial_ref_sys (srid, auth_name, auth_srid, srtext, proj4text)
              VALUES (990001, 'town', 1, NULL, '+proj=tmerc +lat_0=52 +lon_0=13 +k=1 +x_0=0 +y_0=0 +ellps=GRS80 +units=m +no_defs');
            CREATE TABLE towns (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL, outline geometry(Polygon, 990001) NOT NULL,
              centre geography(Point, 4326), area double precision GENERATED ALWAYS AS (ST_Area(outline)) STORED,
              EXCLUDE USING gist (outline WITH &&) WHERE (name = 'exclusive'));
            CREATE INDEX ON towns USING gist (outline); CREATE INDEX ON towns USING spgist (centre);
            CREATE TABLE roads (id bigserial PRIMARY KEY, name text, line geometry(LineStringZM, 990001), source int, target int, cost float8,
              reverse_cost float8, CHECK (ST_IsValid(line)));
            CREATE INDEX roads_line ON roads USING gist (line gist_geometry_ops_nd); CREATE INDEX ON roads USING brin (line);
            CREATE TABLE heights (rid serial PRIMARY KEY, rast raster, seen timestamptz DEFAULT now());
            INSERT INTO heights (rast) SELECT ST_AddBand(ST_MakeEmptyRaster(32, 32, x * 32, 0, 1, -1, 0, 0, 990001), '32BF'::text, x, -1)
              FROM generate_series(1, 20) x;
            SELECT AddRasterConstraints('heights'::name, 'rast'::name);
            CREATE INDEX ON heights USING gist (ST_ConvexHull(rast));
            INSERT INTO towns (name, outline, centre) SELECT 'town ' || n, ST_Buffer(ST_SetSRID(ST_Point(n * 100, n * 50), 990001), 30),
              ST_Point(13 + n / 1000.0, 52)::geography FROM generate_series(1, 2000) n;
            INSERT INTO roads (name, line, source, target, cost, reverse_cost) SELECT 'road ' || n, ST_SetSRID(ST_MakeLine(ST_MakePoint(n, n, 1, 2),
              ST_MakePoint(n + 1, n * 2, 3, 4)), 990001), n, n + 1, n % 7 + 1, n % 5 + 1 FROM generate_series(1, 3000) n;
            CREATE VIEW dense AS SELECT t.id, count(r.*) FROM towns t LEFT JOIN roads r ON ST_DWithin(t.outline, r.line, 5) GROUP BY t.id;
            CREATE MATERIALIZED VIEW cover AS SELECT ST_Union(outline) AS all_of_it FROM towns WHERE id < 50;
            SELECT topology.CreateTopology('blocks', 990001, 0.01);
            CREATE TABLE parcels (id serial PRIMARY KEY, owner text);
            SELECT topology.AddTopoGeometryColumn('blocks', 'public', 'parcels', 'shape', 'POLYGON');
            INSERT INTO parcels (owner, shape) SELECT 'owner ' || n, topology.toTopoGeom(ST_SetSRID(ST_MakeEnvelope(n * 10, 0, n * 10 + 8, 8), 990001),
              'blocks', 1, 0.01) FROM generate_series(1, 25) n;
            -- a county of the geocoder's data, as its loader makes them
            CREATE TABLE tiger_data.ca_edges (CONSTRAINT pk_ca_edges PRIMARY KEY (gid)) INHERITS (tiger.edges);
            ALTER TABLE tiger_data.ca_edges ADD CONSTRAINT chk_statefp CHECK (statefp = '06');
            INSERT INTO tiger_data.ca_edges (statefp, countyfp, tlid, fullname, the_geom) SELECT '06', '001', n, 'Street ' || n,
              ST_SetSRID(ST_Multi(ST_MakeLine(ST_Point(-122, 37), ST_Point(-122 + n / 1000.0, 37))), 4269) FROM generate_series(1, 500) n;
            INSERT INTO tiger.zip_lookup_base (zip, state, county, city, statefp) VALUES ('94601', 'California', 'Alameda', 'Oakland', '06');
            UPDATE tiger.geocode_settings SET setting = 'true' WHERE name = 'debug_geocode_address';
            ANALYZE""", stage.database)

    def clients(self, stage):
        def writer(seed):
            connection, rng = psycopg.connect(stage.through_proxy(), autocommit=True), random.Random(seed)

            def once():
                kind, n = rng.randrange(8), rng.randrange(1, 2000)
                with connection.transaction():
                    if kind == 0:
                        connection.execute("INSERT INTO towns (name, outline, centre) VALUES (%s, ST_Buffer(ST_SetSRID(ST_Point(%s, %s), 990001), "
                                           "20), ST_Point(%s, 51)::geography)", [f"new {n}", rng.random() * 1e6, rng.random() * 1e6, 10 + n / 500])
                    elif kind == 1:
                        connection.execute("UPDATE towns SET outline = ST_Translate(outline, 1, 1) WHERE id = %s", [n])
                    elif kind == 2:
                        connection.execute("DELETE FROM roads WHERE id = %s", [n])
                        connection.execute("INSERT INTO roads (name, line, source, target, cost, reverse_cost) VALUES ('built', ST_SetSRID("
                                           "ST_MakeLine(ST_MakePoint(%s, 1, 1, 1), ST_MakePoint(2, 3, %s, 4)), 990001), %s, %s, 2, 3)", [n, n, n, n + 2])
                    elif kind == 3:
                        connection.execute("UPDATE heights SET rast = ST_SetValue(rast, 1, %s, %s, %s), seen = now() WHERE rid = %s",
                                           [n % 32 + 1, n % 31 + 1, float(n), n % 20 + 1])
                    elif kind == 4:
                        connection.execute("SELECT count(*) FROM towns WHERE outline && ST_SetSRID(ST_MakeEnvelope(%s, 0, %s, 5000), 990001)",
                                           [n, n + 500]).fetchone()
                    elif kind == 5:
                        connection.execute("SELECT * FROM pgr_dijkstra('SELECT id, source, target, cost, reverse_cost FROM roads WHERE id < 300', "
                                           "%s, %s)", [n % 200 + 1, n % 100 + 5]).fetchall()
                    elif kind == 6:
                        connection.execute("SELECT (standardize_address('us_lex', 'us_gaz', 'us_rules', '123 Main Street', 'Oakland CA')).*").fetchone()
                        connection.execute("INSERT INTO tiger_data.ca_edges (statefp, countyfp, tlid, fullname) VALUES ('06', '001', %s, 'made')", [n])
                    else:
                        connection.execute("UPDATE spatial_ref_sys SET auth_srid = auth_srid + 1 WHERE srid = 990001")
            return once

        def surveyor():
            connection = psycopg.connect(stage.through_proxy(), autocommit=True)
            rng = random.Random(9)

            def once():
                n = rng.randrange(26, 100000)
                connection.execute("INSERT INTO parcels (owner, shape) SELECT 'bought', topology.toTopoGeom(ST_SetSRID(ST_MakeEnvelope("
                                   "%s, 100, %s, 108), 990001), 'blocks', 1, 0.01)", [n * 10, n * 10 + 8])
                if rng.randrange(4) == 0:
                    connection.execute("UPDATE parcels SET owner = 'sold', shape = topology.clearTopoGeom(shape) WHERE id = (SELECT min(id) FROM parcels "
                                       "WHERE owner = 'bought')")
            return once
        return [writer(seed) for seed in range(5)] + [surveyor()]


SCHEMA = PostGIS
