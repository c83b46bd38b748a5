//! Row images of statements, held against what a real server does.

mod deep;
mod real;
