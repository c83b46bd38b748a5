//! A command that moves a tenant, as it shows its progress, and orders for it.

use std::time::{Duration, Instant};
use stillpoint_migrate_control::Progress;

/// Time after which a command that has not reported counts as gone.
const REPORT_AGE_MAX: Duration = Duration::from_secs(5);

/// The last report of a command.
#[derive(Debug)]
pub(crate) struct ShownMigration {
    progress: Progress,
    at: Instant,
    /// The operator has ordered the switch, and the command does not know it yet.
    ordered: bool,
}

/// A report, and its age.
#[derive(Debug)]
pub(crate) struct MigrationView {
    pub(crate) progress: Progress,
    pub(crate) age: Duration,
}

impl MigrationView {
    /// Returns true if the command waits for an order to switch.
    pub(crate) fn takes_orders(&self) -> bool {
        self.progress.holding.is_some() && self.progress.ended.is_none() && self.age <= REPORT_AGE_MAX
    }
}

impl ShownMigration {
    /// Replaces the last report. Returns true if the command must switch now: an order is for the command that waited for
    /// it, and is given to it once.
    pub(crate) fn replace(shown: &mut Option<ShownMigration>, progress: Progress) -> bool {
        let is_holding = progress.holding.is_some() && progress.ended.is_none();
        let before = shown.replace(ShownMigration { progress, at: Instant::now(), ordered: false });
        is_holding && before.is_some_and(|before| before.ordered)
    }

    pub(crate) fn view(&self) -> MigrationView {
        MigrationView { progress: self.progress.clone(), age: self.at.elapsed() }
    }

    /// Orders the switch.
    ///
    /// # Errors
    ///
    /// The command does not wait for an order.
    pub(crate) fn order(&mut self) -> Result<(), &'static str> {
        match self.view().takes_orders() {
            true => self.ordered = true,
            false => return Err("no command holds a migration of this database"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_migrate_control::ShortText;

    fn progress(holding: bool) -> Progress {
        Progress { holding: holding.then(|| ShortText::shorten("no switch is ordered")), ..Progress::default() }
    }

    #[test]
    fn an_order_is_given_once_and_only_to_a_command_that_holds() {
        let mut shown = None;
        assert!(!ShownMigration::replace(&mut shown, progress(false)));
        assert!(shown.as_mut().unwrap().order().is_err());
        assert!(!ShownMigration::replace(&mut shown, progress(true)));
        shown.as_mut().unwrap().order().unwrap();
        assert!(ShownMigration::replace(&mut shown, progress(true)));
        assert!(!ShownMigration::replace(&mut shown, progress(true)));
        // A command that does not hold any more gets no order, and no later one gets it either.
        shown.as_mut().unwrap().order().unwrap();
        assert!(!ShownMigration::replace(&mut shown, progress(false)));
        assert!(!ShownMigration::replace(&mut shown, progress(true)));
        let ended = Progress { ended: Some(ShortText::shorten("ended")), ..progress(true) };
        shown.as_mut().unwrap().order().unwrap();
        assert!(!ShownMigration::replace(&mut shown, ended));
        assert!(shown.as_mut().unwrap().order().is_err());
    }

    #[test]
    fn a_command_that_has_gone_silent_takes_no_orders() {
        let mut shown = None;
        ShownMigration::replace(&mut shown, progress(true));
        let shown = shown.as_mut().unwrap();
        let Some(at) = shown.at.checked_sub(REPORT_AGE_MAX + Duration::from_secs(1)) else { return };
        shown.at = at;
        assert!(shown.order().is_err());
    }
}
