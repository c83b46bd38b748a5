//! Cycles of dependencies that a level forbids.
//!
//! Under snapshot isolation every cycle has two read-before edges in sequence. So the search runs on pairs (transaction, true if the last
//! edge was a read-before edge), which exclude two in sequence: any cycle there is an anomaly. Real time ("it had ended before the other
//! began") is a chain of moments, so that the number of its edges is proportional to the number of transactions.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};

use super::list_append::{Dependency, DependencyKind, Inference};
use super::{Anomaly, AnomalyKind, History, Level};

/// Edges from each node; a node is a transaction or a moment.
struct Graph {
    edges: Vec<Vec<(usize, DependencyKind)>>,
    transactions: usize,
}

impl Graph {
    fn new(history: &History, inferred: &Inference, with_time: bool) -> Graph {
        let transactions = history.transactions.len();
        let mut graph = Graph { edges: vec![Vec::new(); transactions], transactions };
        for edge in &inferred.dependencies {
            graph.edges[edge.from].push((edge.to, edge.kind));
        }
        if with_time {
            graph.add_time(history, inferred);
        }
        graph
    }

    fn add_time(&mut self, history: &History, inferred: &Inference) {
        let all = &history.transactions;
        let mut ends: Vec<(u64, usize)> = inferred.happened.iter().map(|&of| (all[of].ended_ns, of)).collect();
        ends.sort_unstable();
        for (at, (_, of)) in ends.iter().enumerate() {
            let moment = self.edges.len();
            self.edges.push(Vec::new());
            self.edges[*of].push((moment, DependencyKind::Earlier));
            if at > 0 {
                self.edges[moment - 1].push((moment, DependencyKind::Earlier));
            }
        }
        for &of in &inferred.happened {
            let before = ends.partition_point(|(ended, _)| *ended < all[of].began_ns);
            if before > 0 {
                self.edges[self.transactions + before - 1].push((of, DependencyKind::Earlier));
            }
        }
    }

    /// Edges between states (twice the node, plus one after a read-before edge); with `skew` two read-before edges may follow each other.
    fn next(&self, state: usize, skew: bool) -> impl Iterator<Item = (usize, DependencyKind)> {
        let (node, after_read_before) = (state / 2, state % 2 == 1);
        let edges = self.edges[node]
            .iter()
            .filter(move |(_, kind)| !(after_read_before && *kind == DependencyKind::ReadBefore));
        edges.map(move |&(to, kind)| (2 * to + usize::from(kind == DependencyKind::ReadBefore && !skew), kind))
    }

    /// Strongly connected components of more than one state.
    fn components(&self, skew: bool) -> Vec<Vec<usize>> {
        let mut search = Search::new(2 * self.edges.len());
        let next = |state: usize| self.next(state, skew).map(|(to, _)| to).collect();
        for root in 0..2 * self.edges.len() {
            search.from(root, &next);
        }
        search.components
    }

    /// Returns the shortest path from a state back to itself within a component.
    fn shortest(&self, component: &[usize], skew: bool) -> Vec<(usize, DependencyKind)> {
        let mut best: Vec<(usize, DependencyKind)> = Vec::new();
        let inside: HashSet<usize> = component.iter().copied().collect();
        // Any cycle proves it; in a large component a few starts find one that is short enough to read.
        for &start in component.iter().take(64) {
            let mut came_from: HashMap<usize, (usize, DependencyKind)> = HashMap::new();
            let mut queue = VecDeque::from([start]);
            while let Some(state) = queue.pop_front().filter(|_| !came_from.contains_key(&start)) {
                for (to, kind) in self.next(state, skew).filter(|(to, _)| inside.contains(to)) {
                    if let Entry::Vacant(entry) = came_from.entry(to) {
                        entry.insert((state, kind));
                        queue.push_back(to);
                    }
                }
            }
            let mut path = Vec::new();
            let mut at = start;
            while let Some(&(from, kind)) = came_from.get(&at) {
                path.push((from / 2, kind));
                at = from;
                if at == start {
                    break;
                }
            }
            path.reverse();
            if !path.is_empty() && (best.is_empty() || path.len() < best.len()) {
                best = path;
            }
        }
        best
    }
}

/// Tarjan's search, without recursion: a long history would overflow the stack.
#[derive(Default)]
struct Search {
    index: Vec<usize>,
    low: Vec<usize>,
    on_stack: Vec<bool>,
    stack: Vec<usize>,
    /// Entered states, each with the edges that are still to be followed.
    calls: Vec<(usize, Vec<usize>)>,
    counter: usize,
    components: Vec<Vec<usize>>,
}

impl Search {
    const NEW: usize = usize::MAX;

    fn new(states: usize) -> Search {
        Search {
            index: vec![Search::NEW; states],
            low: vec![0; states],
            on_stack: vec![false; states],
            ..Search::default()
        }
    }

    fn enter(&mut self, state: usize, next: Vec<usize>) {
        (self.index[state], self.low[state]) = (self.counter, self.counter);
        self.counter += 1;
        self.stack.push(state);
        self.on_stack[state] = true;
        self.calls.push((state, next));
    }

    fn from(&mut self, root: usize, next: &impl Fn(usize) -> Vec<usize>) {
        if self.index[root] != Search::NEW {
            return;
        }
        self.enter(root, next(root));
        while let Some((state, left)) = self.calls.last_mut() {
            let state = *state;
            match left.pop() {
                Some(to) if self.index[to] == Search::NEW => self.enter(to, next(to)),
                Some(to) if self.on_stack[to] => self.low[state] = self.low[state].min(self.index[to]),
                Some(_) => {}
                None => self.leave(state),
            }
        }
    }

    fn leave(&mut self, state: usize) {
        self.calls.pop();
        if let Some((caller, _)) = self.calls.last() {
            self.low[*caller] = self.low[*caller].min(self.low[state]);
        }
        if self.low[state] < self.index[state] {
            return;
        }
        let at = self.stack.iter().rposition(|&other| other == state).unwrap_or(0);
        let component = self.stack.split_off(at);
        component.iter().for_each(|&other| self.on_stack[other] = false);
        if component.len() > 1 {
            self.components.push(component);
        }
    }
}

pub(super) fn find(history: &History, inferred: &Inference, level: Level) -> Vec<Anomaly> {
    let (with_time, skew) = (level != Level::ReadCommitted, level == Level::Serializable);
    let chosen = |edge: &&Dependency| level != Level::ReadCommitted || edge.kind != DependencyKind::ReadBefore;
    let inferred = Inference {
        dependencies: inferred.dependencies.iter().filter(chosen).copied().collect(),
        happened: inferred.happened.clone(),
    };
    // Cycles without real time first: they are easier to interpret.
    let plain = Graph::new(history, &inferred, false);
    let mut found = describe(&plain, &inferred, false);
    if found.is_empty() && with_time {
        found = describe(&Graph::new(history, &inferred, true), &inferred, false);
    }
    if found.is_empty() && skew {
        found = describe(&Graph::new(history, &inferred, true), &inferred, true);
    }
    found
}

fn describe(graph: &Graph, inferred: &Inference, skew: bool) -> Vec<Anomaly> {
    let mut anomalies: Vec<Anomaly> = Vec::new();
    for component in graph.components(skew) {
        let cycle = graph.shortest(&component, skew);
        let members: Vec<usize> =
            cycle.iter().map(|(node, _)| *node).filter(|node| *node < graph.transactions).collect();
        let same = |anomaly: &Anomaly| anomaly.transactions.iter().all(|number| members.contains(number));
        if members.is_empty() || anomalies.iter().any(same) {
            continue;
        }
        let kind = classify(&cycle, &members, inferred, skew);
        let text = cycle.iter().filter(|(node, _)| *node < graph.transactions);
        let text: Vec<String> = text.map(|(node, kind)| format!("{node} -{}->", name(*kind))).collect();
        anomalies.push(Anomaly::new(kind, members.clone(), format!("{} {}", text.join(" "), members[0])));
    }
    anomalies
}

fn name(kind: DependencyKind) -> &'static str {
    match kind {
        DependencyKind::Overwritten => "ww",
        DependencyKind::Read => "wr",
        DependencyKind::ReadBefore => "rw",
        DependencyKind::Earlier => "time",
    }
}

fn classify(cycle: &[(usize, DependencyKind)], members: &[usize], inferred: &Inference, skew: bool) -> AnomalyKind {
    let count = |kind: DependencyKind| cycle.iter().filter(|(_, other)| *other == kind).count();
    let in_sequence = skew && count(DependencyKind::ReadBefore) > 1;
    match (count(DependencyKind::ReadBefore), count(DependencyKind::Read), count(DependencyKind::Earlier)) {
        _ if in_sequence => AnomalyKind::WriteSkew,
        (_, _, 1..) => AnomalyKind::StaleRead,
        (0, 0, _) => AnomalyKind::DirtyWrite,
        (0, _, _) => AnomalyKind::CircularInformation,
        (1, _, _) if lost_update(members, inferred) => AnomalyKind::LostUpdate,
        (1, _, _) => AnomalyKind::ReadSkew,
        _ => AnomalyKind::SnapshotCycle,
    }
}

/// Returns true if both transactions wrote a list, one of them based on a state that the other had replaced.
fn lost_update(members: &[usize], inferred: &Inference) -> bool {
    let &[a, b] = members else { return false };
    inferred.dependencies.iter().any(|read| {
        let back = Dependency { from: read.to, to: read.from, kind: DependencyKind::Overwritten, list: read.list };
        let between = (read.from, read.to) == (a, b) || (read.from, read.to) == (b, a);
        read.kind == DependencyKind::ReadBefore && between && inferred.dependencies.binary_search(&back).is_ok()
    })
}
