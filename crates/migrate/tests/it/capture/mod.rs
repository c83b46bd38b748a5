//! Row images of statements, compared with the effects on a real server.

mod deep;
mod real;
