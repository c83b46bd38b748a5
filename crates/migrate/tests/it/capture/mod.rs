//! Row images of statements, compared with the effects on a real server.

mod parser_limits;
mod real_server;
