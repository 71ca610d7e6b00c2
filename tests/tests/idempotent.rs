//! Requests that are repeated after a failure: what is told of those that are not idempotent, what is
//! refused, and what is learnt of programs that take up something else.

#[path = "idempotent/bodies.rs"]
mod bodies;
#[path = "idempotent/clients.rs"]
mod clients;
#[path = "idempotent/counts.rs"]
mod counts;
#[path = "idempotent/kept.rs"]
mod kept;
#[path = "idempotent/refused.rs"]
mod refused;
#[path = "idempotent/scene.rs"]
mod scene;
