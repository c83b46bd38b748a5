// pgjdbc through the proxy: batches, server-prepared statements, copies, cursors, notifications, cancelling.

import java.io.StringReader;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import org.postgresql.PGConnection;
import org.postgresql.PGNotification;

public class Smoke {
    static void check(boolean holds, String what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }

    static void batches(Connection connection) throws Exception {
        try (Statement statement = connection.createStatement()) {
            statement.execute("create temp table rows (a int, b text)");
        }
        try (PreparedStatement insert = connection.prepareStatement("insert into rows values (?, ?)")) {
            for (int i = 0; i < 1000; i++) {
                insert.setInt(1, i);
                insert.setString(2, "x".repeat(i));
                insert.addBatch();
            }
            check(insert.executeBatch().length == 1000, "a batch");
        }
        // after five executions the driver prepares it at the server by a name
        try (PreparedStatement select = connection.prepareStatement("select length(b) from rows where a = ?")) {
            for (int i = 0; i < 50; i++) {
                select.setInt(1, i);
                try (ResultSet rows = select.executeQuery()) {
                    check(rows.next() && rows.getInt(1) == i, "row " + i);
                }
            }
        }
    }

    static void copies(Connection connection) throws Exception {
        var copies = connection.unwrap(PGConnection.class).getCopyAPI();
        check(copies.copyIn("copy rows from stdin", new StringReader("7\tseven\n8\teight\n")) == 2, "copy in");
        var out = new java.io.StringWriter();
        check(copies.copyOut("copy (select * from rows where b = 'seven') to stdout", out) == 1, "copy out");
        check(out.toString().equals("7\tseven\n"), out.toString());
        try {
            copies.copyIn("copy rows from stdin", new StringReader("no number\tx\n"));
            check(false, "a row that is none was taken");
        } catch (SQLException refused) {
            check("22P02".equals(refused.getSQLState()), refused.toString());
        }
    }

    static void cursors(Connection connection) throws Exception {
        connection.setAutoCommit(false);
        try (Statement statement = connection.createStatement()) {
            statement.setFetchSize(100);
            int count = 0;
            try (ResultSet rows = statement.executeQuery("select generate_series(1, 1050)")) {
                while (rows.next()) {
                    count++;
                }
            }
            check(count == 1050, "a cursor");
        }
        connection.commit();
        connection.setAutoCommit(true);
    }

    static void notifications(Connection connection, String url) throws Exception {
        try (Connection other = DriverManager.getConnection(url); Statement statement = other.createStatement();
                Statement notify = connection.createStatement()) {
            statement.execute("listen channel");
            notify.execute("notify channel, 'payload'");
            PGNotification[] heard = other.unwrap(PGConnection.class).getNotifications(60_000);
            check(heard != null && heard[0].getParameter().equals("payload"), "a notification");
            // the driver cancels on a connection of its own
            statement.setQueryTimeout(1);
            try {
                statement.execute("select pg_sleep(60)");
                check(false, "the statement was not cancelled");
            } catch (SQLException cancelled) {
                check("57014".equals(cancelled.getSQLState()), cancelled.toString());
            }
            statement.execute("select 1");
        }
    }

    public static void main(String[] arguments) throws Exception {
        try (Connection connection = DriverManager.getConnection(arguments[0])) {
            batches(connection);
            copies(connection);
            cursors(connection);
            notifications(connection, arguments[0]);
            System.out.println("pgjdbc " + connection.getMetaData().getDriverVersion() + " passed");
        }
    }
}
