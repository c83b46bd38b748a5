//! Clients of a shop: half of their transactions are orders (after TPC-W's ordering mix; tables and statements are this
//! crate's own), all of them at REPEATABLE READ, and none writes a value that depends on the time.

use super::servers::ProxiedServers;
use crate::Random;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stillpoint_testing::postgresql::Cluster;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio_postgres::{Client, NoTls};

const CUSTOMERS: u64 = 2000;
const ITEMS: u64 = 2000;
/// Most tries of a transaction that conflicts with another one's row.
const ATTEMPTS_MAX: usize = 50;

/// Clients that are connected, and their counts.
pub(super) struct Shop {
    clients: JoinSet<()>,
    stop: Arc<AtomicBool>,
    begin: Arc<Barrier>,
    /// Orders that were committed.
    ordered: Arc<AtomicU64>,
    /// Transactions that were committed, orders among them.
    all: Arc<AtomicU64>,
}

impl Shop {
    /// Makes the tables.
    #[track_caller]
    pub(super) fn open(source: &Cluster) {
        source.sql(
            "shop",
            &format!(
                "CREATE TABLE customer (id int PRIMARY KEY, name text UNIQUE, visits int NOT NULL, balance int NOT NULL); \
                 CREATE TABLE item (id int PRIMARY KEY, title text NOT NULL, stock int NOT NULL, cost int NOT NULL); \
                 CREATE TABLE orders (id bigint PRIMARY KEY, customer int NOT NULL, total int NOT NULL); \
                 CREATE TABLE line (orders bigint, item int, count int NOT NULL, PRIMARY KEY (orders, item)); \
                 INSERT INTO customer SELECT i, 'customer ' || i, 0, 0 FROM generate_series(1, {CUSTOMERS}) i; \
                 INSERT INTO item SELECT i, repeat('title ' || i, 5), 1000, i % 90 + 10 FROM generate_series(1, {ITEMS}) i; \
                 ANALYZE"
            ),
        );
    }

    /// Connects `clients` clients, which begin on [`Shop::begin`]; each thinks for `think` between two transactions.
    pub(super) async fn connect(conninfo: &str, clients: usize, think: Duration) -> Shop {
        let begin = Arc::new(Barrier::new(clients + 1));
        let (stop, ordered, all) =
            (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let mut set = JoinSet::new();
        for number in 0..clients {
            let (client, connection) = tokio_postgres::connect(conninfo, NoTls).await.expect("connect a client");
            tokio::spawn(connection);
            let customer =
                Customer { client, number: number as u64, orders: 0, random: Random::new(number as u64 + 1) };
            let (stop, begin, ordered, all) = (stop.clone(), begin.clone(), ordered.clone(), all.clone());
            set.spawn(customer.live(begin, stop, ordered, all, think));
        }
        Shop { clients: set, stop, begin, ordered, all }
    }

    /// Lets clients begin.
    pub(super) async fn begin(&self) {
        self.begin.wait().await;
    }

    /// Lets clients end their current transactions. Returns the orders and transactions that were committed.
    pub(super) async fn end(self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        self.clients.join_all().await;
        (self.ordered.load(Ordering::Relaxed), self.all.load(Ordering::Relaxed))
    }
}

/// Clients at work.
pub struct LoadClients {
    shop: Shop,
    begun: Instant,
}

/// Starts `clients` clients, each of which thinks for `think` between two transactions.
pub async fn busy(servers: &ProxiedServers, clients: usize, think: Duration) -> LoadClients {
    let shop = Shop::connect(&servers.conninfo(), clients, think).await;
    shop.begin().await;
    LoadClients { shop, begun: Instant::now() }
}

impl LoadClients {
    /// Lets clients end. Returns their committed transactions a second.
    pub async fn end(self) -> f64 {
        let seconds = self.begun.elapsed().as_secs_f64();
        self.shop.end().await.1 as f64 / seconds
    }
}

struct Customer {
    client: Client,
    number: u64,
    orders: u64,
    random: Random,
}

impl Customer {
    async fn live(
        mut self,
        begin: Arc<Barrier>,
        stop: Arc<AtomicBool>,
        ordered: Arc<AtomicU64>,
        all: Arc<AtomicU64>,
        think: Duration,
    ) {
        begin.wait().await;
        while !stop.load(Ordering::Relaxed) {
            let orders = self.random.below(2) == 0;
            let statements = if orders { self.order() } else { self.browse() };
            self.commit(&statements).await;
            all.fetch_add(1, Ordering::Relaxed);
            ordered.fetch_add(u64::from(orders), Ordering::Relaxed);
            // Between nothing and twice as long.
            tokio::time::sleep(think.mul_f64(self.random.below(2000) as f64 / 1000.0)).await;
        }
    }

    fn browse(&mut self) -> Vec<String> {
        let (customer, first) = (self.random.below(CUSTOMERS) + 1, self.random.below(ITEMS - 20) + 1);
        vec![
            format!("SELECT name, balance FROM customer WHERE id = {customer}"),
            format!("SELECT id, title, cost FROM item WHERE id BETWEEN {first} AND {} ORDER BY cost", first + 20),
            format!("SELECT title, stock FROM item WHERE id = {first}"),
            format!("SELECT o.id, o.total FROM orders o WHERE o.id = {}", self.number * 1_000_000 + self.orders),
        ]
    }

    fn order(&mut self) -> Vec<String> {
        self.orders += 1;
        let id = self.number * 1_000_000 + self.orders;
        let customer = self.random.below(CUSTOMERS) + 1;
        let one = self.random.below(ITEMS / 2) + 1;
        let other = one + ITEMS / 2;
        vec![
            format!("SELECT name, balance FROM customer WHERE id = {customer}"),
            format!("SELECT id, cost FROM item WHERE id IN ({one}, {other})"),
            format!("SELECT sum(stock) FROM item WHERE id BETWEEN {one} AND {}", one + 20),
            // The value that it writes depends on its snapshot.
            format!(
                "INSERT INTO orders (id, customer, total) SELECT {id}, {customer}, max(cost) FROM item WHERE id IN ({one}, {other})"
            ),
            format!("INSERT INTO line (orders, item, count) VALUES ({id}, {one}, 1), ({id}, {other}, 2)"),
            format!("UPDATE item SET stock = stock - 1 WHERE id = {one}"),
            format!("UPDATE customer SET visits = visits + 1, balance = balance + 10 WHERE id = {customer}"),
        ]
    }

    async fn commit(&self, statements: &[String]) {
        for _ in 0..ATTEMPTS_MAX {
            match self.attempt(statements).await {
                Ok(()) => return,
                Err(error) if error.code().is_some_and(|code| code.code() == "40001") => {
                    self.client.batch_execute("ROLLBACK").await.expect("roll back");
                }
                Err(error) => panic!("client {}: {error:?}", self.number),
            }
        }
        panic!("client {}: a transaction failed {ATTEMPTS_MAX} times", self.number);
    }

    async fn attempt(&self, statements: &[String]) -> Result<(), tokio_postgres::Error> {
        self.client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await?;
        for statement in statements {
            self.client.simple_query(statement).await?;
        }
        self.client.batch_execute("COMMIT").await
    }
}
