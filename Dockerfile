# An image for one machine or for the nodes of a Ray cluster (docs/cluster.md):
#     docker build -t sparring .
#     docker build -t sparring:cuda --build-arg TORCH=https://download.pytorch.org/whl/cu128 .
FROM python:3.11-slim AS build
ARG TORCH=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/sparring
ENV PATH=/opt/sparring/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /build
COPY constraints.txt ./
RUN pip install -c constraints.txt torch --index-url "$TORCH"
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY pipeline pipeline
COPY services services
RUN pip install -c constraints.txt '.[train,gymnasium,keys,onnx,page,pettingzoo,ray]' 'ray[default]'

FROM python:3.11-slim
COPY --from=build /opt/sparring /opt/sparring
# What KubeRay asks of an image: wget for its probes, and commands that a login shell finds, too.
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/* \
    && ln -s /opt/sparring/bin/ray /opt/sparring/bin/sparring /usr/local/bin/
RUN useradd --create-home --uid 1000 sparring && install -d -o sparring /results
ENV PATH=/opt/sparring/bin:$PATH
USER sparring
WORKDIR /results
VOLUME /results
ENTRYPOINT ["sparring"]
CMD ["--help"]
