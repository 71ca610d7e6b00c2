//! Paths, parameters and answers.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json, Router,
    body::Body,
    extract::{FromRequestParts, Path, Query, Request, State},
    http::{StatusCode, header, request::Parts},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Deserialize, de::DeserializeOwned};

use super::{Shared, events, large};
use crate::control::{
    Caller, Manual,
    api::{
        ApiError, ConfigView, DoctorReport, ErrorBody, Explanation, Handover, MANUAL_DEFAULT,
        ManualResult, PauseResult, Peer, ReloadResult, StatusEnvelope, check_order_workload,
        check_workload, parse_for,
    },
};

/// Longest destination or workload that is looked at, bytes: a path below the cgroup mount may
/// have 4,095.
const NAME_BYTES: usize = 4096;

type App = State<Arc<Shared>>;

/// The control interface.
pub fn control(shared: Arc<Shared>) -> Router {
    let router = Router::new()
        .route("/v1/destinations", get(destinations))
        .route("/v1/destinations/{dest}", get(destination))
        .route("/v1/destinations/{dest}/trip", post(trip))
        .route("/v1/destinations/{dest}/hold-closed", post(hold_closed))
        .route("/v1/destinations/{dest}/reset", post(reset))
        .route("/v1/explain", get(explain))
        .route("/v1/events", get(event_lines))
        .route("/v1/config", get(config))
        .route("/v1/doctor", get(doctor))
        .route("/v1/reload", post(reload))
        .route("/v1/handover", post(hand_over))
        .route("/v1/handover/end", post(end_handover))
        .route("/v1/pause", post(pause))
        .route("/v1/resume", post(resume));
    finish(router, shared)
}

/// What anybody who reaches the TCP listener may see.
pub fn http(shared: Arc<Shared>) -> Router {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz));
    finish(router, shared)
}

fn finish(router: Router<Arc<Shared>>, shared: Arc<Shared>) -> Router {
    router
        .method_not_allowed_fallback(async |request: Request| {
            let message = format!(
                "{} {}: this path takes another method",
                request.method(),
                request.uri().path()
            );
            error(StatusCode::METHOD_NOT_ALLOWED, message)
        })
        .fallback(async |request: Request| {
            let path = request.uri().path();
            ApiError::NotFound(format!("{path}: no such path"))
        })
        .layer(middleware::from_fn_with_state(
            Arc::clone(&shared),
            refuse_large_body,
        ))
        .with_state(shared)
}

fn error(status: StatusCode, error: String) -> Response {
    (status, Json(ErrorBody { error })).into_response()
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Conflict(_) => StatusCode::CONFLICT,
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        error(status, self.to_string())
    }
}

/// No request needs a body. A small one is ignored, a large one refused before it is read.
async fn refuse_large_body(State(shared): App, request: Request, next: Next) -> Response {
    let announced = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<u64>().ok())
        .unwrap_or(0);
    let limit = shared.limits.body_bytes;
    if announced > limit {
        let message = format!("a body of {announced} bytes; at most {limit} are accepted");
        return error(StatusCode::PAYLOAD_TOO_LARGE, message);
    }
    next.run(request).await
}

/// Query parameters; unknown ones are refused, so that a typing error is not silently ignored.
struct Params<T>(T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // What is no UTF-8 would come out as a text that nobody wrote.
        let query = parts.uri.query().unwrap_or_default();
        if percent_encoding::percent_decode_str(query)
            .decode_utf8()
            .is_err()
        {
            return Err(ApiError::BadRequest(format!(
                "{query:?} is not UTF-8; want parameters in UTF-8, percent-encoded"
            )));
        }
        match Query::<T>::try_from_uri(&parts.uri) {
            Ok(Query(params)) => Ok(Self(params)),
            Err(rejection) => Err(ApiError::BadRequest(rejection.body_text())),
        }
    }
}

/// The `{dest}` of the path, percent-decoded.
struct Destination(String);

impl<S: Send + Sync> FromRequestParts<S> for Destination {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|rejection| ApiError::BadRequest(rejection.body_text()))?;
        check_name("destination", &text)?;
        Ok(Self(text))
    }
}

fn check_name(what: &str, text: &str) -> Result<(), ApiError> {
    if text.is_empty() || text.len() > NAME_BYTES || text.contains(|c: char| c.is_control()) {
        return Err(ApiError::BadRequest(format!(
            "{what}: want 1 to {NAME_BYTES} bytes without control characters"
        )));
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoParams {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EventParams {
    #[serde(default)]
    follow: bool,
    #[serde(default)]
    all: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ForParams {
    #[serde(rename = "for")]
    duration: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ManualParams {
    workload: Option<String>,
    #[serde(rename = "for")]
    duration: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkloadParams {
    workload: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExplainParams {
    destination: String,
    workload: Option<String>,
    pid: Option<u32>,
}

fn duration(text: Option<String>) -> Result<Option<Duration>, ApiError> {
    text.map(|text| parse_for(&text).map_err(|e| ApiError::BadRequest(format!("for: {e}"))))
        .transpose()
}

impl Shared {
    /// Waits for the daemon's loop, within reason.
    async fn answer<T>(
        &self,
        answer: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let limit = self.limits.answer;
        tokio::time::timeout(limit, answer)
            .await
            .unwrap_or_else(|_| {
                Err(ApiError::Unavailable(format!(
                    "the agent's loop did not answer within {limit:?}; see its log"
                )))
            })
    }

    async fn status(self: Arc<Self>, destination: Option<String>) -> Result<Response, ApiError> {
        let turn = self.statuses.take().await?;
        // A task, so that a client that goes does not give its turn to another while its rows are
        // still in memory.
        let body = tokio::spawn(async move {
            let collected = async {
                let collecting = self.collecting.lock().await;
                let envelope = self.backend.status(destination).await?;
                Ok((collecting, envelope))
            };
            let (collecting, envelope) = self.answer(collected).await?;
            // 50,000 rows are some 75 MB of JSON: not on the thread that serves the others.
            let json = tokio::task::spawn_blocking(move || render(envelope))
                .await
                .map_err(|e| ApiError::Internal(format!("writing the status: {e}")))?
                .map_err(|e| ApiError::Internal(format!("writing the status: {e}")))?;
            drop(collecting);
            Ok(large::body(large::returned(json), turn))
        })
        .await
        .map_err(|e| ApiError::Internal(format!("collecting the status: {e}")))??;
        Ok((
            [(header::CONTENT_TYPE, "application/json")],
            Body::from(body),
        )
            .into_response())
    }

    async fn metrics(self: Arc<Self>) -> Result<Response, ApiError> {
        let turn = self.pages.take().await?;
        // A task for the same reason, and so that a page once begun serves whoever asks next.
        let body = tokio::spawn(async move {
            let made = async { self.backend.metrics().await };
            let page = self.answer(self.page.get(made)).await?;
            Ok::<_, ApiError>(large::body(page, turn))
        })
        .await
        .map_err(|e| ApiError::Internal(format!("writing the metrics: {e}")))??;
        let kind = "text/plain; version=0.0.4; charset=utf-8";
        Ok(([(header::CONTENT_TYPE, kind)], Body::from(body)).into_response())
    }

    async fn manual(
        &self,
        destination: String,
        workload: Option<String>,
        action: Manual,
        by: Peer,
    ) -> Result<Json<ManualResult>, ApiError> {
        if let Some(workload) = &workload {
            check_order_workload(workload)
                .map_err(|e| ApiError::BadRequest(format!("workload: {e}")))?;
        }
        let shown = workload.as_deref().unwrap_or("all").to_owned();
        let asked = self
            .backend
            .manual(destination.clone(), workload, action, by);
        let result = self.answer(asked).await;
        match &result {
            Ok(done) => {
                tracing::info!(%destination, workload = shown, ?action, %by, rows = done.rows, "manual action");
            }
            Err(error) => {
                tracing::warn!(%destination, workload = shown, ?action, %by, %error, "manual action refused");
            }
        }
        result.map(Json)
    }
}

fn render(mut envelope: StatusEnvelope) -> serde_json::Result<Vec<u8>> {
    envelope.sort();
    let mut json = serde_json::to_vec(&envelope)?;
    json.push(b'\n');
    Ok(json)
}

async fn destinations(
    State(shared): App,
    Params(NoParams {}): Params<NoParams>,
) -> Result<Response, ApiError> {
    shared.status(None).await
}

async fn destination(
    State(shared): App,
    Destination(destination): Destination,
    Params(NoParams {}): Params<NoParams>,
) -> Result<Response, ApiError> {
    shared.status(Some(destination)).await
}

async fn trip(
    State(shared): App,
    Extension(by): Extension<Peer>,
    Destination(destination): Destination,
    Params(params): Params<ManualParams>,
) -> Result<Json<ManualResult>, ApiError> {
    let action = Manual::Trip(duration(params.duration)?.unwrap_or(MANUAL_DEFAULT));
    shared
        .manual(destination, params.workload, action, by)
        .await
}

async fn hold_closed(
    State(shared): App,
    Extension(by): Extension<Peer>,
    Destination(destination): Destination,
    Params(params): Params<ManualParams>,
) -> Result<Json<ManualResult>, ApiError> {
    let action = Manual::HoldClosed(duration(params.duration)?.unwrap_or(MANUAL_DEFAULT));
    shared
        .manual(destination, params.workload, action, by)
        .await
}

async fn reset(
    State(shared): App,
    Extension(by): Extension<Peer>,
    Destination(destination): Destination,
    Params(params): Params<WorkloadParams>,
) -> Result<Json<ManualResult>, ApiError> {
    shared
        .manual(destination, params.workload, Manual::Reset, by)
        .await
}

async fn explain(
    State(shared): App,
    Params(params): Params<ExplainParams>,
) -> Result<Json<Explanation>, ApiError> {
    check_name("destination", &params.destination)?;
    let caller = match (params.workload, params.pid) {
        (None, None) => Caller::Any,
        (Some(workload), None) => {
            check_workload(&workload)
                .map_err(|e| ApiError::BadRequest(format!("workload: {e}")))?;
            Caller::Workload(workload)
        }
        (None, Some(0)) => {
            return Err(ApiError::BadRequest("pid: want 1 or more".to_owned()));
        }
        (None, Some(pid)) => Caller::Process(pid),
        (Some(_), Some(_)) => {
            return Err(ApiError::BadRequest(
                "workload and pid: want one of them, or neither".to_owned(),
            ));
        }
    };
    let explained = shared.backend.explain(params.destination, caller);
    shared.answer(explained).await.map(Json)
}

async fn event_lines(
    State(shared): App,
    Params(params): Params<EventParams>,
) -> Result<Response, ApiError> {
    let body = if params.follow {
        let slot = Arc::clone(&shared.followers)
            .try_acquire_owned()
            .map_err(|_| {
                let limit = shared.limits.followers;
                ApiError::Unavailable(format!("{limit} readers follow the events already"))
            })?;
        events::follow(shared.backend.events(params.all), params.all, slot)
    } else {
        events::kept(&shared.backend.events(params.all), params.all)
    };
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

async fn config(
    State(shared): App,
    Params(NoParams {}): Params<NoParams>,
) -> Result<Json<ConfigView>, ApiError> {
    shared.answer(shared.backend.config()).await.map(Json)
}

async fn doctor(
    State(shared): App,
    Params(NoParams {}): Params<NoParams>,
) -> Result<Json<DoctorReport>, ApiError> {
    shared.answer(shared.backend.doctor()).await.map(Json)
}

async fn reload(
    State(shared): App,
    Extension(by): Extension<Peer>,
    Params(NoParams {}): Params<NoParams>,
) -> Result<Json<ReloadResult>, ApiError> {
    tracing::info!(%by, "reload asked for");
    shared.answer(shared.backend.reload(by)).await.map(Json)
}

async fn hand_over(
    State(shared): App,
    Extension(by): Extension<Peer>,
    Params(NoParams {}): Params<NoParams>,
) -> Result<Json<Handover>, ApiError> {
    shared.answer(shared.backend.hand_over(by)).await.map(Json)
}

async fn end_handover(
    State(shared): App,
    Extension(by): Extension<Peer>,
    Params(NoParams {}): Params<NoParams>,
) -> Result<Json<()>, ApiError> {
    shared
        .answer(shared.backend.end_handover(by))
        .await
        .map(Json)
}

async fn pause(
    State(shared): App,
    Extension(by): Extension<Peer>,
    Params(params): Params<ForParams>,
) -> Result<Json<PauseResult>, ApiError> {
    let duration = duration(params.duration)?;
    let paused = shared.backend.pause(duration, by);
    let result = shared.answer(paused).await;
    match &result {
        Ok(_) => tracing::warn!(%by, ?duration, "paused"),
        Err(error) => tracing::warn!(%by, ?duration, %error, "pause refused"),
    }
    result.map(Json)
}

async fn resume(
    State(shared): App,
    Extension(by): Extension<Peer>,
    Params(NoParams {}): Params<NoParams>,
) -> Result<Json<PauseResult>, ApiError> {
    let result = shared.answer(shared.backend.resume(by)).await;
    match &result {
        Ok(_) => tracing::info!(%by, "resumed"),
        Err(error) => tracing::warn!(%by, %error, "resume refused"),
    }
    result.map(Json)
}

async fn metrics(State(shared): App) -> Result<Response, ApiError> {
    shared.metrics().await
}

async fn healthz(State(shared): App) -> Response {
    let health = shared.backend.health();
    verdict(health.alive, health.reason)
}

async fn readyz(State(shared): App) -> Response {
    let health = shared.backend.health();
    verdict(health.alive && health.ready, health.reason)
}

fn verdict(good: bool, reason: String) -> Response {
    let status = if good {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, format!("{reason}\n")).into_response()
}
