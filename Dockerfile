# syntax=docker/dockerfile:1
# The server in a container.
#   GPU: docker build -t mambaslots --build-arg EXTRAS=serve,hf,gpu,fla .
#        docker run --gpus all -p 8000:8000 mambaslots serve Qwen/Qwen3.5-4B --host 0.0.0.0
#   CPU: docker build -t mambaslots --build-arg TORCH=https://download.pytorch.org/whl/cpu .
#        docker run -p 8000:8000 mambaslots
FROM python:3.12-slim

# Triton compiles a small launcher with the system's compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=serve,hf
ARG TORCH=https://pypi.org/simple
WORKDIR /mambaslots
COPY pyproject.toml setup.py README.md LICENSE ./
COPY core core
COPY models models
RUN pip install --no-cache-dir --index-url "$TORCH" --extra-index-url https://pypi.org/simple ".[$EXTRAS]"

EXPOSE 8000
ENTRYPOINT ["mambaslots"]
CMD ["serve", "models/tiny-code", "--threads", "1", "--host", "0.0.0.0"]
