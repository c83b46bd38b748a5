//! Phases, and the driver that runs a list of them.

use crate::{Fault, Faults, Side};
use std::fmt;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Instant;
use stillpoint_events::EventKind;

/// Future that borrows the operation.
type Pending<'o, E> = Pin<Box<dyn Future<Output = Result<(), E>> + 'o>>;

/// Work of a phase, forward or back.
pub enum Step<O: Operation> {
    /// Ends before it returns.
    Blocking(fn(&mut O) -> Result<(), O::Error>),
    /// Is awaited.
    Async(for<'o> fn(&'o mut O) -> Pending<'o, O::Error>),
    /// Rounds, as long as one is due, perhaps none. Each is a phase of its own in events and fault points: the name with its number.
    Rounds {
        /// Returns true if one more round is due.
        is_due: fn(&O) -> bool,
        /// One round, which ends before it returns.
        round: fn(&mut O) -> Result<(), O::Error>,
    },
}

impl<O: Operation> Step<O> {
    async fn take(&self, operation: &mut O) -> Result<(), O::Error> {
        match self {
            Step::Blocking(step) => step(operation),
            Step::Async(step) => step(operation).await,
            Step::Rounds { round, .. } => round(operation),
        }
    }
}

/// Inverse of a phase.
pub enum Undo<O: Operation> {
    /// There is nothing to undo: the phase only looks or waits, or another phase's inverse undoes it too.
    Nothing,
    /// The inverse. It is also run if the phase itself failed halfway, so it must accept any part of it.
    Inverse(Step<O>),
    /// The point of no return: once this phase has succeeded, neither it nor an earlier phase is undone.
    PointOfNoReturn,
}

/// One phase of an operation.
pub struct Phase<O: Operation> {
    /// Name, unique in its list; in events, in timings and in fault points.
    pub name: &'static str,
    /// Forward step.
    pub forward: Step<O>,
    /// Inverse of the forward step.
    pub undo: Undo<O>,
}

impl<O: Operation> Phase<O> {
    /// A phase that blocks, with its inverse.
    pub const fn new(
        name: &'static str,
        forward: fn(&mut O) -> Result<(), O::Error>,
        inverse: fn(&mut O) -> Result<(), O::Error>,
    ) -> Phase<O> {
        Phase { name, forward: Step::Blocking(forward), undo: Undo::Inverse(Step::Blocking(inverse)) }
    }

    /// A phase that blocks and has nothing to undo.
    pub const fn without_inverse(name: &'static str, forward: fn(&mut O) -> Result<(), O::Error>) -> Phase<O> {
        Phase { name, forward: Step::Blocking(forward), undo: Undo::Nothing }
    }

    /// A phase that blocks, and after which nothing is undone.
    pub const fn point_of_no_return(name: &'static str, forward: fn(&mut O) -> Result<(), O::Error>) -> Phase<O> {
        Phase { name, forward: Step::Blocking(forward), undo: Undo::PointOfNoReturn }
    }

    /// A phase of [`Step::Rounds`] that has nothing to undo.
    pub const fn rounds(
        name: &'static str,
        is_due: fn(&O) -> bool,
        round: fn(&mut O) -> Result<(), O::Error>,
    ) -> Phase<O> {
        Phase { name, forward: Step::Rounds { is_due, round }, undo: Undo::Nothing }
    }
}

/// State of an operation while its phases run.
pub trait Operation: Sized {
    /// Error of a phase.
    type Error: From<Fault> + fmt::Display;
    /// Name of the operation in events.
    const NAME: &'static str;
    /// True if an inverse relies on those of all later phases: after one that fails, none is run.
    const UNDO_STOPS_AT_FAILURE: bool = false;

    /// Requested faults.
    fn faults(&self) -> &Faults;

    /// Receives one event.
    fn report(&mut self, event: EventKind);

    /// Is called before a phase, which is not reported yet: an operation that needs a permission waits for it here.
    ///
    /// # Errors
    ///
    /// The permission is refused; then the phase does not begin, and the phases before it are undone.
    fn permit(&mut self, _phase: &'static str) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Is called before the first action of a phase: an operation with a journal records it here.
    ///
    /// # Errors
    ///
    /// The journal cannot be written; then the phase does not begin, and the phases before it are undone.
    fn begin(&mut self, _phase: &'static str) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Is called after a phase, or a round of one, with its duration in nanoseconds and its error.
    fn ended(&mut self, _phase: &str, _duration_ns: u64, _error: Option<&Self::Error>) {}

    /// Is called when a phase has failed, before any inverse is run. Returns false if nothing may be undone although the list has not passed
    /// its point of no return: the object of the operation is gone, or its state shows that the point was passed.
    fn may_undo(&mut self, _error: &Self::Error) -> bool {
        true
    }
}

/// Failure of an operation.
#[derive(Debug)]
pub struct Failed<E> {
    /// Phase that failed.
    pub phase: &'static str,
    /// Its error.
    pub error: E,
    /// True if the point of no return had been passed, or [`Operation::may_undo`] returned false: then nothing was undone.
    pub is_final: bool,
    /// Phases whose inverse failed, with its error; the others before `phase` are undone, unless the operation stops at a failure.
    pub not_undone: Vec<(&'static str, E)>,
}

/// Runs phase after phase. On an error it runs the inverses of the phases that were begun, last first. Unless the operation states
/// [`Operation::UNDO_STOPS_AT_FAILURE`], it goes on when one of them fails: as little as possible is to be left.
///
/// # Errors
///
/// The first phase that failed, and the inverses that failed.
pub async fn run<O: Operation>(operation: &mut O, phases: &[Phase<O>]) -> Result<(), Failed<O::Error>> {
    let Err(mut failed) = advance(operation, phases).await else { return Ok(()) };
    failed.is_final |= !operation.may_undo(&failed.error);
    if !failed.is_final {
        let begun = phases.iter().take_while(|phase| phase.name != failed.phase).count() + 1;
        failed.not_undone = undo(operation, &phases[..begun]).await;
    }
    Err(failed)
}

/// Runs phase after phase, and undoes nothing: after an error the caller decides whether to call [`undo`], and with which phases.
///
/// # Errors
///
/// The first phase that failed.
pub async fn advance<O: Operation>(operation: &mut O, phases: &[Phase<O>]) -> Result<(), Failed<O::Error>> {
    for (at, phase) in phases.iter().enumerate() {
        let (has_acted, result) = forward(operation, phase).await;
        if let Err(error) = result {
            let passed = at + usize::from(has_acted);
            let is_final = phases[..passed].iter().any(|phase| matches!(phase.undo, Undo::PointOfNoReturn));
            return Err(Failed { phase: phase.name, error, is_final, not_undone: Vec::new() });
        }
    }
    Ok(())
}

/// Runs phases of which none is [`Step::Async`], without an executor.
///
/// # Errors
///
/// Those of [`run`].
///
/// # Panics
///
/// If a step is asynchronous and has to wait.
pub fn run_blocking<O: Operation>(operation: &mut O, phases: &[Phase<O>]) -> Result<(), Failed<O::Error>> {
    complete_at_once::<O, _>(run(operation, phases))
}

/// Runs the inverses of phases that another process began and did not end, last first; returns those that failed, with their errors.
///
/// # Panics
///
/// If an inverse is asynchronous and has to wait.
pub fn undo_blocking<O: Operation>(operation: &mut O, begun: &[Phase<O>]) -> Vec<(&'static str, O::Error)> {
    complete_at_once::<O, _>(undo(operation, begun))
}

fn complete_at_once<O: Operation, T>(work: impl Future<Output = T>) -> T {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("operation {} has an asynchronous phase", O::NAME),
    }
}

/// Runs one phase; returns true if its forward step has succeeded, and the result with faults.
async fn forward<O: Operation>(operation: &mut O, phase: &Phase<O>) -> (bool, Result<(), O::Error>) {
    if let Err(error) = operation.permit(phase.name) {
        return (false, Err(error));
    }
    let Step::Rounds { is_due, .. } = phase.forward else { return take(operation, phase, phase.name).await };
    let mut rounds = 0;
    while is_due(operation) {
        rounds += 1;
        let done = take(operation, phase, &format!("{}{rounds}", phase.name)).await;
        if done.1.is_err() {
            return done;
        }
    }
    (true, Ok(()))
}

/// Takes the step of a phase, or one of its rounds, under a name.
async fn take<O: Operation>(operation: &mut O, phase: &Phase<O>, name: &str) -> (bool, Result<(), O::Error>) {
    let event = |is_end: Option<u64>| {
        let (operation, phase) = (O::NAME.into(), name.into());
        match is_end {
            None => EventKind::PhaseStarted { operation, phase },
            Some(duration_ns) => EventKind::PhaseEnded { operation, phase, duration_ns },
        }
    };
    operation.report(event(None));
    let begun = Instant::now();
    let mut result = operation.begin(phase.name);
    if result.is_ok() {
        result = operation.faults().reach(name, Side::Before).map_err(O::Error::from);
    }
    if result.is_ok() {
        result = phase.forward.take(operation).await;
    }
    let has_acted = result.is_ok();
    if has_acted {
        result = operation.faults().reach(name, Side::After).map_err(O::Error::from);
    }
    let duration_ns = begun.elapsed().as_nanos() as u64;
    operation.ended(name, duration_ns, result.as_ref().err());
    operation.report(event(Some(duration_ns)));
    (has_acted, result)
}

/// Runs the inverses of phases, last first, and goes on when one of them fails. Returns the phases that are not undone.
pub async fn undo<O: Operation>(operation: &mut O, begun: &[Phase<O>]) -> Vec<(&'static str, O::Error)> {
    let mut not_undone = Vec::new();
    for phase in begun.iter().rev() {
        let Undo::Inverse(inverse) = &phase.undo else { continue };
        let mut result = operation.faults().reach(phase.name, Side::Inverse).map_err(O::Error::from);
        if result.is_ok() {
            result = inverse.take(operation).await;
        }
        if let Err(error) = result {
            tracing::error!(operation = O::NAME, phase = phase.name, "the phase could not be undone: {error}");
            not_undone.push((phase.name, error));
            if O::UNDO_STOPS_AT_FAILURE {
                break;
            }
        }
    }
    not_undone
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, FaultPoint};

    /// Records what is done to it.
    #[derive(Default)]
    struct Recorder {
        faults: Faults,
        done: Vec<String>,
        events: Vec<EventKind>,
        fails_to_undo: Option<&'static str>,
        rounds: usize,
        refused: Option<&'static str>,
    }

    impl Operation for Recorder {
        type Error = Error;
        const NAME: &'static str = "record";

        fn faults(&self) -> &Faults {
            &self.faults
        }

        fn report(&mut self, event: EventKind) {
            self.events.push(event);
        }

        fn permit(&mut self, phase: &'static str) -> Result<(), Error> {
            if self.refused == Some(phase) { Err(Error::Guardian("refused".into())) } else { Ok(()) }
        }

        fn begin(&mut self, phase: &'static str) -> Result<(), Error> {
            self.done.push(format!("journal {phase}"));
            Ok(())
        }
    }

    fn inverse(recorder: &mut Recorder, name: &'static str) -> Result<(), Error> {
        recorder.done.push(format!("undo {name}"));
        match recorder.fails_to_undo {
            Some(phase) if phase == name => Err(Error::Guardian("no".into())),
            _ => Ok(()),
        }
    }

    fn forward(recorder: &mut Recorder, name: &str) -> Result<(), Error> {
        recorder.done.push(name.into());
        Ok(())
    }

    const PHASES: [Phase<Recorder>; 4] = [
        Phase::new("load", |r| forward(r, "load"), |r| inverse(r, "load")),
        Phase::without_inverse("wait", |r| forward(r, "wait")),
        Phase {
            name: "freeze",
            forward: Step::Async(|r| Box::pin(async { forward(r, "freeze") })),
            undo: Undo::Inverse(Step::Async(|r| Box::pin(async { inverse(r, "freeze") }))),
        },
        Phase::new("seal", |r| forward(r, "seal"), |r| inverse(r, "seal")),
    ];

    fn failing(point: FaultPoint) -> (Recorder, Failed<Error>) {
        let mut recorder = Recorder { faults: Faults::none().failing(point), ..Recorder::default() };
        let failed = run_blocking(&mut recorder, &PHASES).unwrap_err();
        recorder.done.retain(|done| !done.starts_with("journal"));
        (recorder, failed)
    }

    #[test]
    fn phases_run_in_order_and_each_is_journaled_before_it_acts() {
        let mut recorder = Recorder::default();
        run_blocking(&mut recorder, &PHASES).unwrap_or_else(|failed| panic!("{failed:?}"));
        let both = PHASES.iter().flat_map(|phase| [format!("journal {}", phase.name), phase.name.into()]);
        assert_eq!(recorder.done, both.collect::<Vec<_>>());
        assert_eq!(recorder.events.len(), 8);
    }

    #[test]
    fn a_failure_undoes_what_was_begun_in_reverse() {
        let (recorder, failed) = failing(FaultPoint::before("freeze"));
        assert_eq!(recorder.done, ["load", "wait", "undo freeze", "undo load"]);
        assert!(matches!(&failed.error, Error::Fault(fault) if fault.0 == FaultPoint::before("freeze")), "{failed:?}");
        assert_eq!((failed.phase, failed.is_final, failed.not_undone.len()), ("freeze", false, 0));
        let (recorder, _) = failing(FaultPoint::after("seal"));
        assert_eq!(recorder.done, ["load", "wait", "freeze", "seal", "undo seal", "undo freeze", "undo load"]);
        let ends = recorder.events.iter().filter(|event| matches!(event, EventKind::PhaseEnded { .. }));
        assert_eq!(ends.count(), 4, "the phase that failed ends, too");
    }

    #[test]
    fn an_inverse_that_fails_keeps_no_other_from_being_run() {
        let faults = Faults::none().failing(FaultPoint::before("seal"));
        let mut recorder = Recorder { faults, fails_to_undo: Some("freeze"), ..Recorder::default() };
        let failed = run_blocking(&mut recorder, &PHASES).unwrap_err();
        assert_eq!(failed.not_undone.iter().map(|(phase, _)| *phase).collect::<Vec<_>>(), ["freeze"]);
        assert_eq!(recorder.done.last().map(String::as_str), Some("undo load"));
    }

    #[test]
    fn an_inverse_fails_at_its_own_point() {
        let faults = Faults::none().failing(FaultPoint::before("seal")).failing(FaultPoint::inverse("freeze"));
        let mut recorder = Recorder { faults, ..Recorder::default() };
        let failed = run_blocking(&mut recorder, &PHASES).unwrap_err();
        assert_eq!(failed.not_undone.iter().map(|(phase, _)| *phase).collect::<Vec<_>>(), ["freeze"]);
        assert!(!recorder.done.contains(&"undo freeze".to_owned()), "{:?}", recorder.done);
    }

    /// Undoes in order only, and never after a failed guardian.
    struct Ordered(Recorder);

    impl Operation for Ordered {
        type Error = Error;
        const NAME: &'static str = "ordered";
        const UNDO_STOPS_AT_FAILURE: bool = true;

        fn faults(&self) -> &Faults {
            &self.0.faults
        }

        fn report(&mut self, event: EventKind) {
            self.0.events.push(event);
        }

        fn may_undo(&mut self, error: &Error) -> bool {
            !matches!(error, Error::Guardian(_))
        }
    }

    const ORDERED: [Phase<Ordered>; 3] = [
        Phase::new("load", |o| forward(&mut o.0, "load"), |o| inverse(&mut o.0, "load")),
        Phase::new("arm", |o| forward(&mut o.0, "arm"), |o| inverse(&mut o.0, "arm")),
        Phase::new("hold", |_| Err(Error::Guardian("gone".into())), |o| inverse(&mut o.0, "hold")),
    ];

    #[test]
    fn an_ordered_operation_undoes_nothing_below_a_failed_inverse() {
        let faults = Faults::none().failing(FaultPoint::after("arm"));
        let mut ordered = Ordered(Recorder { faults, fails_to_undo: Some("arm"), ..Recorder::default() });
        let failed = run_blocking(&mut ordered, &ORDERED).unwrap_err();
        assert_eq!(ordered.0.done, ["load", "arm", "undo arm"]);
        assert_eq!((failed.is_final, failed.not_undone.len()), (false, 1));
        ordered.0 = Recorder::default();
        assert!(undo_blocking(&mut ordered, &ORDERED[..2]).is_empty());
        assert_eq!(ordered.0.done, ["undo arm", "undo load"]);
    }

    #[test]
    fn an_operation_that_refuses_to_undo_leaves_all_as_it_is() {
        let mut ordered = Ordered(Recorder::default());
        let failed = run_blocking(&mut ordered, &ORDERED).unwrap_err();
        assert_eq!((failed.phase, failed.is_final), ("hold", true));
        assert_eq!(ordered.0.done, ["load", "arm"]);
    }

    #[test]
    fn nothing_is_undone_after_the_point_of_no_return() {
        let phases = [
            Phase::<Recorder>::new("copy", |r| forward(r, "copy"), |r| inverse(r, "copy")),
            Phase::point_of_no_return("switch", |r| forward(r, "switch")),
            Phase::new("settle", |r| forward(r, "settle"), |r| inverse(r, "settle")),
        ];
        let run = |point| {
            let faults = Faults::none().failing(point);
            let mut recorder = Recorder { faults, ..Recorder::default() };
            let failed = run_blocking(&mut recorder, &phases).unwrap_err();
            (failed.is_final, recorder.done.iter().any(|done| done.starts_with("undo")))
        };
        assert_eq!(run(FaultPoint::before("settle")), (true, false));
        assert_eq!(run(FaultPoint::after("switch")), (true, false));
        assert_eq!(run(FaultPoint::before("switch")), (false, true));
    }

    #[test]
    fn rounds_are_phases_of_their_own_as_long_as_they_are_due() {
        let phases = [
            Phase::<Recorder>::new("load", |r| forward(r, "load"), |r| inverse(r, "load")),
            Phase::rounds(
                "pass-",
                |r| r.rounds > 0,
                |r| {
                    r.rounds -= 1;
                    forward(r, "pass")
                },
            ),
        ];
        let run = |rounds, faults| {
            let mut recorder = Recorder { faults, rounds, ..Recorder::default() };
            let result = run_blocking(&mut recorder, &phases);
            recorder.done.retain(|done| !done.starts_with("journal"));
            let started = |event: EventKind| match event {
                EventKind::PhaseStarted { phase, .. } => Some(phase),
                _ => None,
            };
            (result.is_ok(), recorder.done, recorder.events.into_iter().filter_map(started).collect::<Vec<_>>())
        };
        assert_eq!(run(0, Faults::none()), (true, vec!["load".into()], vec!["load".into()]));
        assert_eq!(run(2, Faults::none()).2, ["load", "pass-1", "pass-2"]);
        let (is_ok, done, _) = run(3, Faults::none().failing(FaultPoint::before("pass-2")));
        assert_eq!((is_ok, done), (false, ["load", "pass", "undo load"].map(String::from).to_vec()));
    }

    #[test]
    fn a_phase_without_permission_is_not_reported() {
        let mut recorder = Recorder { refused: Some("wait"), ..Recorder::default() };
        let failed = run_blocking(&mut recorder, &PHASES).unwrap_err();
        assert_eq!((failed.phase, recorder.events.len()), ("wait", 2));
        assert_eq!(recorder.done, ["journal load", "load", "undo load"]);
    }
}
