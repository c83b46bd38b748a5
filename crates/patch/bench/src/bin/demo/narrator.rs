//! Output for a person: numbered steps with the time since the start.

use std::time::Instant;

/// Prints steps and their events.
pub(crate) struct Narrator {
    start: Instant,
    step: u32,
}

impl Narrator {
    /// Starts the clock.
    pub(crate) fn new() -> Narrator {
        Narrator { start: Instant::now(), step: 0 }
    }

    /// Begins the next step.
    pub(crate) fn step(&mut self, title: &str) {
        self.step += 1;
        println!("\n{}. {title}", self.step);
    }

    /// Prints one event.
    pub(crate) fn print(&self, text: &str) {
        let seconds = self.start.elapsed().as_secs();
        println!("   {:>2}:{:02}  {text}", seconds / 60, seconds % 60);
    }
}
