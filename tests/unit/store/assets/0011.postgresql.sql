--
-- PostgreSQL database dump
--

-- Dumped from database version 16.2
-- Dumped by pg_dump version 16.2

SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

SET default_tablespace = '';

SET default_table_access_method = heap;

--
-- Name: alembic_version; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);


--
-- Name: audit; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.audit (
    id bigint NOT NULL,
    at character varying NOT NULL,
    token character varying NOT NULL,
    action character varying NOT NULL,
    search_id character varying NOT NULL
);


--
-- Name: audit_id_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: audit_id_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.audit_id_seq OWNED BY public.audit.id;


--
-- Name: contexts; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.contexts (
    hardware_key character varying NOT NULL,
    stack_key character varying NOT NULL,
    workload_key character varying NOT NULL,
    version bigint NOT NULL,
    last_trial_id bigint NOT NULL
);


--
-- Name: estimates; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.estimates (
    key character varying NOT NULL,
    estimate json NOT NULL,
    recorded_at character varying NOT NULL
);


--
-- Name: events; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.events (
    search_id character varying NOT NULL,
    seq integer NOT NULL,
    kind character varying NOT NULL,
    at character varying NOT NULL,
    body json NOT NULL
);


--
-- Name: hardware; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.hardware (
    digest character varying NOT NULL,
    key character varying NOT NULL,
    name character varying NOT NULL,
    body json NOT NULL
);


--
-- Name: idempotency_keys; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.idempotency_keys (
    token character varying NOT NULL,
    key character varying NOT NULL,
    digest character varying NOT NULL,
    search_id character varying NOT NULL
);


--
-- Name: probes; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.probes (
    hardware_key character varying NOT NULL,
    stack_key character varying NOT NULL,
    shapes_key character varying NOT NULL,
    body json NOT NULL,
    recorded_at character varying NOT NULL
);


--
-- Name: searches; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.searches (
    search_id character varying NOT NULL,
    hardware_digest character varying,
    stack_key character varying,
    workload_key character varying NOT NULL,
    state character varying NOT NULL,
    started_at character varying NOT NULL,
    ended_at character varying,
    request json NOT NULL,
    result json,
    digest character varying,
    campaign_id character varying,
    hardware_name character varying,
    lease_owner character varying,
    lease_expires_at double precision,
    lease_epoch integer DEFAULT 0 NOT NULL,
    spent_seconds double precision DEFAULT '0'::double precision NOT NULL,
    spent_trials integer DEFAULT 0 NOT NULL,
    last_seq integer DEFAULT 0 NOT NULL
);


--
-- Name: stacks; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.stacks (
    key character varying NOT NULL,
    body json NOT NULL
);


--
-- Name: tokens; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.tokens (
    name character varying NOT NULL,
    scope character varying NOT NULL,
    digest character varying NOT NULL,
    created_at character varying NOT NULL,
    revoked_at character varying
);


--
-- Name: trials; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.trials (
    id bigint NOT NULL,
    hardware_digest character varying NOT NULL,
    hardware_key character varying NOT NULL,
    stack_key character varying NOT NULL,
    workload_key character varying NOT NULL,
    config_key character varying NOT NULL,
    memory_limit_bytes bigint NOT NULL,
    attempt integer NOT NULL,
    search_id character varying,
    family character varying NOT NULL,
    outcome character varying NOT NULL,
    device_bytes bigint,
    tokens_per_second double precision,
    seconds double precision NOT NULL,
    recorded_at character varying NOT NULL,
    config json NOT NULL,
    evidence json NOT NULL,
    stopped_early boolean DEFAULT false NOT NULL,
    prediction json,
    device_state json,
    suspect boolean DEFAULT false NOT NULL,
    uid character varying,
    node character varying,
    autofit_version character varying,
    search_epoch integer,
    driver character varying
);


--
-- Name: trials_id_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.trials_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: trials_id_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.trials_id_seq OWNED BY public.trials.id;


--
-- Name: workloads; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.workloads (
    key character varying NOT NULL,
    model character varying NOT NULL,
    body json NOT NULL
);


--
-- Name: audit id; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.audit ALTER COLUMN id SET DEFAULT nextval('public.audit_id_seq'::regclass);


--
-- Name: trials id; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.trials ALTER COLUMN id SET DEFAULT nextval('public.trials_id_seq'::regclass);


--
-- Data for Name: alembic_version; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.alembic_version VALUES ('0011');


--
-- Data for Name: audit; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.audit VALUES (1, '2026-11-29T20:30:09.309119+00:00', 'ann', 'cancel', 'cancelled');


--
-- Data for Name: contexts; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.contexts VALUES ('236d8dc0fdc37d88', '7d6bbe71a63612fc', 'aaee8e4c1eab90ea', 1, 10);
INSERT INTO public.contexts VALUES ('236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', 13, 14);


--
-- Data for Name: estimates; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.estimates VALUES ('0000000000000000000000000000000000000000000000000000000000000000', '{"device_bytes":22548578304}', '2026-11-29T20:30:09.220011+00:00');


--
-- Data for Name: events; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.events VALUES ('running', 1, 'running', '2026-11-29T20:30:08.763946+00:00', '{"epoch":1,"driver":"elsewhere:1:0"}');
INSERT INTO public.events VALUES ('succeeded', 1, 'running', '2026-11-29T20:30:08.787311+00:00', '{"epoch":1,"driver":"elsewhere:1:0"}');
INSERT INTO public.events VALUES ('cancelled', 1, 'running', '2026-11-29T20:30:08.813453+00:00', '{"epoch":1,"driver":"elsewhere:1:0"}');
INSERT INTO public.events VALUES ('failed', 1, 'running', '2026-11-29T20:30:08.831921+00:00', '{"epoch":1,"driver":"elsewhere:1:0"}');
INSERT INTO public.events VALUES ('succeeded', 2, 'trial', '2026-11-29T20:30:08.873455+00:00', '{"trial_id":1,"config":{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":8},"outcome":"fits","device_bytes":8589934592,"tokens_per_second":900.0,"seconds":12.25}');
INSERT INTO public.events VALUES ('succeeded', 3, 'trial', '2026-11-29T20:30:08.913251+00:00', '{"trial_id":2,"config":{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16},"outcome":"fits","device_bytes":17179869184,"tokens_per_second":1000.5,"seconds":12.25}');
INSERT INTO public.events VALUES ('succeeded', 4, 'trial', '2026-11-29T20:30:08.939888+00:00', '{"trial_id":3,"config":{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16},"outcome":"fits","device_bytes":17179869184,"tokens_per_second":1001.5,"seconds":12.25}');
INSERT INTO public.events VALUES ('succeeded', 5, 'trial', '2026-11-29T20:30:08.964752+00:00', '{"trial_id":4,"config":{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":32},"outcome":"fits","device_bytes":34359738368,"tokens_per_second":700.0,"seconds":12.25}');
INSERT INTO public.events VALUES ('cancelled', 2, 'cancelled', '2026-11-29T20:30:09.303954+00:00', '{}');
INSERT INTO public.events VALUES ('succeeded', 6, 'succeeded', '2026-11-29T20:30:09.335980+00:00', '{"trials":1}');
INSERT INTO public.events VALUES ('failed', 2, 'failed', '2026-11-29T20:30:09.345787+00:00', '{}');


--
-- Data for Name: hardware; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.hardware VALUES ('034bdad13f786aec', '236d8dc0fdc37d88', 'h100-80g', '{"name":"h100-80g","kind":"cuda","device_name":"NVIDIA H100 80GB HBM3","memory_bytes":85899345920,"count":1,"cores":0,"host_memory_bytes":0,"capability":"9.0","bf16":true,"peak_flops":989400000000000.0,"instructions":null,"power_limit_watts":null,"mig_profile":null}');


--
-- Data for Name: idempotency_keys; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: probes; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.probes VALUES ('236d8dc0fdc37d88', '7d6bbe71a63612fc', '0000000000000000', '{"hardware":{"name":"h100-80g","kind":"cuda","device_name":"NVIDIA H100 80GB HBM3","memory_bytes":85899345920,"count":1,"cores":0,"host_memory_bytes":0,"capability":"9.0","bf16":true,"peak_flops":989400000000000.0,"instructions":null,"power_limit_watts":null,"mig_profile":null},"stack":{"python":"3.11.9","torch":"2.13.0","transformers":"5.23.0","peft":"0.21.2","bitsandbytes":null,"deepspeed":null,"flash_attn":null,"liger_kernel":null,"mamba_ssm":null,"causal_conv1d":null,"flash_linear_attention":null,"cuda":"13.0","driver":null},"model":"llama-3.1-8b","shapes_key":"0000000000000000","parts":[{"name":"products in fp32","seconds":0.30000000000000004,"seconds_per":{"product/fp32/nt":1e-11},"figures":{},"failure":null},{"name":"attention in fp16","seconds":1.0,"seconds_per":{},"figures":{},"failure":"RuntimeError: not implemented"}],"steps":[{"config":{"method":"lora"},"layers":2,"seconds":0.6,"work":null}],"seconds":9.5,"recorded_at":"2026-01-01T00:00:00+00:00","device_state":null,"version":6}', '2026-01-01T00:00:00+00:00');


--
-- Data for Name: searches; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.searches VALUES ('running', '034bdad13f786aec', '7d6bbe71a63612fc', 'f159e706383d3538', 'running', '2026-11-29T20:30:08.752559+00:00', NULL, '{"space":"one-gpu"}', NULL, 'running', NULL, NULL, 'elsewhere:1:0', 1795984238.758349, 1, 0, 0, 1);
INSERT INTO public.searches VALUES ('cancelled', '034bdad13f786aec', '7d6bbe71a63612fc', 'f159e706383d3538', 'cancelled', '2026-11-29T20:30:08.809767+00:00', '2026-11-29T20:30:09.299257+00:00', '{"space":"one-gpu"}', NULL, 'cancelled', NULL, NULL, 'elsewhere:1:0', 1795984238.813168, 1, 0, 0, 2);
INSERT INTO public.searches VALUES ('succeeded', '034bdad13f786aec', '7d6bbe71a63612fc', 'f159e706383d3538', 'succeeded', '2026-11-29T20:30:08.781970+00:00', '2026-11-29T20:30:09.323249+00:00', '{"space":"one-gpu"}', '{"trials":1}', 'succeeded', NULL, NULL, NULL, NULL, 1, 0, 4, 6);
INSERT INTO public.searches VALUES ('failed', '034bdad13f786aec', '7d6bbe71a63612fc', 'f159e706383d3538', 'failed', '2026-11-29T20:30:08.826584+00:00', '2026-11-29T20:30:09.343986+00:00', '{"space":"one-gpu"}', NULL, 'failed', NULL, NULL, NULL, NULL, 1, 0, 0, 2);


--
-- Data for Name: stacks; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.stacks VALUES ('7d6bbe71a63612fc', '{"python":"3.11.9","torch":"2.13.0","transformers":"5.23.0","peft":"0.21.2","bitsandbytes":null,"deepspeed":null,"flash_attn":null,"liger_kernel":null,"mamba_ssm":null,"causal_conv1d":null,"flash_linear_attention":null,"cuda":"13.0","driver":null}');


--
-- Data for Name: tokens; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.tokens VALUES ('ann', 'run', '57a70e4e77c5b5c7f768e2e8a7cde41285078226e7a26ed1e907a1b18d520d83', '2026-11-29T20:30:09.257128+00:00', NULL);
INSERT INTO public.tokens VALUES ('bob', 'read', '4470ca1ff9cf20608c2538d344cc29becbaa47846f53108b1f2276d572e302df', '2026-11-29T20:30:09.268902+00:00', '2026-11-29T20:30:09.279590+00:00');


--
-- Data for Name: trials; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.trials VALUES (1, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '539f52a91c41263a', 85899345920, 1, 'succeeded', 'method=lora,rank=8,precision=bf16-mixed', 'fits', 8589934592, 900, 12.25, '2026-01-01T00:00:00Z', '{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":8}', '{"outcome":"fits","measurement":{"tokens_per_second":900.0,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":8589934589,"peak_reserved_bytes":8589934590,"device_bytes":8589934592,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}', false, NULL, NULL, false, '0b000a73b59648439c5e909ed9b352db', NULL, '0.1.0', 1, NULL);
INSERT INTO public.trials VALUES (2, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '1adc3de57783a4ff', 85899345920, 1, 'succeeded', 'method=lora,rank=16,precision=bf16-mixed', 'fits', 17179869184, 1000.5, 12.25, '2026-01-01T00:00:01Z', '{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}', '{"outcome":"fits","measurement":{"tokens_per_second":1000.5,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":17179869181,"peak_reserved_bytes":17179869182,"device_bytes":17179869184,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}', false, NULL, NULL, false, '5a4aabbbbf9d406a8a0e5b85e407e998', NULL, '0.1.0', 1, NULL);
INSERT INTO public.trials VALUES (3, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '1adc3de57783a4ff', 85899345920, 2, 'succeeded', 'method=lora,rank=16,precision=bf16-mixed', 'fits', 17179869184, 1001.5, 12.25, '2026-01-01T00:00:02Z', '{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}', '{"outcome":"fits","measurement":{"tokens_per_second":1001.5,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":17179869181,"peak_reserved_bytes":17179869182,"device_bytes":17179869184,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}', false, NULL, NULL, false, '34ea7b6f27434d8ebdebeac33ec9a419', NULL, '0.1.0', 1, NULL);
INSERT INTO public.trials VALUES (4, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '549b7cb7e3c54cd4', 85899345920, 1, 'succeeded', 'method=lora,rank=32,precision=bf16-mixed', 'fits', 34359738368, 700, 12.25, '2026-01-01T00:00:03Z', '{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":32}', '{"outcome":"fits","measurement":{"tokens_per_second":700.0,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":34359738365,"peak_reserved_bytes":34359738366,"device_bytes":34359738368,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}', false, NULL, NULL, false, 'cc1c76b6f82644c8b04c16dab9b90cdd', NULL, '0.1.0', 1, NULL);
INSERT INTO public.trials VALUES (5, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '1adc3de57783a4ff', 85899345920, 3, NULL, 'method=lora,rank=16,precision=bf16-mixed', 'out_of_memory', NULL, NULL, 12.25, '2026-01-01T00:00:04Z', '{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}', '{"outcome":"out_of_memory","reason":"tried to allocate 2 GiB","phase":"backward","requested_bytes":2147483648,"signal":null,"host":false}', false, NULL, NULL, false, '98639301e26b431c83aa34e76d7fc8a0', NULL, '0.1.0', NULL, NULL);
INSERT INTO public.trials VALUES (6, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', 'a5984c2a3659e53d', 85899345920, 1, NULL, 'method=lora,rank=16,precision=bf16-mixed', 'timed_out', NULL, NULL, 12.25, '2026-01-01T00:00:05Z', '{"compile":false,"method":"lora","micro_batch":2,"precision":"bf16-mixed","rank":16}', '{"outcome":"timed_out","reason":"no end within 60 s","deadline_seconds":60.0,"phase":"forward","phases_entered":0,"least_step_seconds":null,"is_proven":false,"peak_bytes":null,"timed_seconds":[]}', false, NULL, NULL, false, 'a7500614b85b42e58c7c426a2f21b4f6', NULL, '0.1.0', NULL, NULL);
INSERT INTO public.trials VALUES (7, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '8447f001bc709bfd', 85899345920, 1, NULL, 'method=lora,rank=16,precision=bf16-mixed', 'crashed', NULL, NULL, 12.25, '2026-01-01T00:00:06Z', '{"compile":false,"method":"lora","micro_batch":4,"precision":"bf16-mixed","rank":16}', '{"outcome":"crashed","reason":"SIGSEGV","phase":null,"signal":"SIGSEGV","exit_code":-11,"stderr_tail":"na\u00efve \u0000 \u2603\n","transient":false,"worker_lost":false}', false, NULL, NULL, false, 'be83998067694216a76b3c6f72e10a35', NULL, '0.1.0', NULL, NULL);
INSERT INTO public.trials VALUES (8, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '9d532e6c2ea54332', 85899345920, 1, NULL, 'method=lora,rank=16,precision=bf16-mixed', 'diverged', NULL, NULL, 12.25, '2026-01-01T00:00:07Z', '{"compile":false,"method":"lora","micro_batch":8,"precision":"bf16-mixed","rank":16}', '{"outcome":"diverged","reason":"loss is not finite","losses":[11.5,null],"reference_loss":11.5}', false, NULL, NULL, false, 'cdaf678e89a645bcb1aca5528d78ed2f', NULL, '0.1.0', NULL, NULL);
INSERT INTO public.trials VALUES (9, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', 'cd729b0e028456cc', 85899345920, 1, NULL, 'method=lora,rank=16,precision=bf16-mixed', 'unsupported', NULL, NULL, 12.25, '2026-01-01T00:00:08Z', '{"compile":false,"method":"lora","micro_batch":16,"precision":"bf16-mixed","rank":16}', '{"outcome":"unsupported","reason":"flash attention needs compute capability 8.0"}', false, NULL, NULL, false, '4b021f5a6996428bb765142d74059d43', NULL, '0.1.0', NULL, NULL);
INSERT INTO public.trials VALUES (10, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'aaee8e4c1eab90ea', '1adc3de57783a4ff', 25769803776, 1, NULL, 'method=lora,rank=16,precision=bf16-mixed', 'fits', 21474836480, 1234.5678901234567, 12.25, '2026-01-01T00:00:09Z', '{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}', '{"outcome":"fits","measurement":{"tokens_per_second":1234.5678901234567,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":21474836477,"peak_reserved_bytes":21474836478,"device_bytes":21474836480,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}', false, NULL, NULL, false, '284da2a8ef964293b93402753efca362', NULL, '0.1.0', NULL, NULL);
INSERT INTO public.trials VALUES (11, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '1adc3de57783a4ff', 85899345920, 4, NULL, 'method=lora,rank=16,precision=bf16-mixed', 'fits', 21474836480, 1234.5678901234567, 12.25, '2026-01-01T00:00:10Z', '{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}', '{"outcome":"fits","measurement":{"tokens_per_second":1234.5678901234567,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":21474836477,"peak_reserved_bytes":21474836478,"device_bytes":21474836480,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}', false, '{"peak_allocated_bytes":20401094657,"device_bytes":22548578304,"step_seconds":0.30000000000000004,"calibrated_on":5,"relative_error":null,"work":null,"memory_error":0.0,"peak_reserved_bytes":21474836487,"micro_step_seconds":null}', NULL, false, '37722c7950154596b7b82b0baf39a717', NULL, '0.1.0', NULL, NULL);
INSERT INTO public.trials VALUES (12, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '1adc3de57783a4ff', 85899345920, 5, NULL, 'method=lora,rank=16,precision=bf16-mixed', 'out_of_memory', NULL, NULL, 12.25, '2026-01-01T00:00:11Z', '{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}', '{"outcome":"out_of_memory","reason":"tried to allocate 2 GiB","phase":"backward","requested_bytes":2147483648,"signal":null,"host":false}', false, '{"peak_allocated_bytes":20401094657,"device_bytes":22548578304,"step_seconds":0.30000000000000004,"calibrated_on":5,"relative_error":null,"work":null,"memory_error":0.0,"peak_reserved_bytes":21474836487,"micro_step_seconds":null}', NULL, false, '63846775bb864fb4b5520889c9972106', NULL, '0.1.0', NULL, NULL);
INSERT INTO public.trials VALUES (13, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '8811b72b3962bdd1', 85899345920, 1, NULL, 'method=lora,rank=64,precision=bf16-mixed', 'fits', 21474836480, 1234.5678901234567, 12.25, '2026-01-01T00:00:12Z', '{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":64}', '{"outcome":"fits","measurement":{"tokens_per_second":1234.5678901234567,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":21474836477,"peak_reserved_bytes":21474836478,"device_bytes":21474836480,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}', false, NULL, '{"seconds":3.25,"processor":null,"cards":[{"uuid":"GPU-a","sm_clock_mhz":null,"sm_clock_max_mhz":null,"power_limit_watts":null,"power_limit_default_watts":null,"throttle_mask":null,"others_bytes":null,"others_share":0.45,"memory_errors":null}]}', true, '5cfbed8736f54bfbb1cc74708fce535a', NULL, '0.1.0', NULL, NULL);
INSERT INTO public.trials VALUES (14, '034bdad13f786aec', '236d8dc0fdc37d88', '7d6bbe71a63612fc', 'f159e706383d3538', '8811b72b3962bdd1', 85899345920, 2, NULL, 'method=lora,rank=64,precision=bf16-mixed', 'fits', 21474836480, 1234.5678901234567, 12.25, '2026-01-01T00:00:13Z', '{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":64}', '{"outcome":"fits","measurement":{"tokens_per_second":1234.5678901234567,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":21474836477,"peak_reserved_bytes":21474836478,"device_bytes":21474836480,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}', false, NULL, NULL, false, '5f2d27b1701c4f2f8520ae6765f47f16', NULL, '0.1.0', NULL, NULL);


--
-- Data for Name: workloads; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.workloads VALUES ('f159e706383d3538', 'llama-3.1-8b', '{"model":"llama-3.1-8b","seq_len":2048,"global_batch":64,"lora_dropout":0.05,"devices":1,"seed":0,"model_digest":"0123456789abcdef"}');
INSERT INTO public.workloads VALUES ('aaee8e4c1eab90ea', 'llama-3.1-8b', '{"model":"llama-3.1-8b","seq_len":4096,"global_batch":64,"lora_dropout":0.05,"devices":1,"seed":0,"model_digest":"0123456789abcdef"}');


--
-- Name: audit_id_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.audit_id_seq', 1, true);


--
-- Name: trials_id_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.trials_id_seq', 14, true);


--
-- Name: alembic_version alembic_version_pkc; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);


--
-- Name: audit pk_audit; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.audit
    ADD CONSTRAINT pk_audit PRIMARY KEY (id);


--
-- Name: contexts pk_contexts; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.contexts
    ADD CONSTRAINT pk_contexts PRIMARY KEY (hardware_key, stack_key, workload_key);


--
-- Name: estimates pk_estimates; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.estimates
    ADD CONSTRAINT pk_estimates PRIMARY KEY (key);


--
-- Name: events pk_events; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events
    ADD CONSTRAINT pk_events PRIMARY KEY (search_id, seq);


--
-- Name: hardware pk_hardware; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.hardware
    ADD CONSTRAINT pk_hardware PRIMARY KEY (digest);


--
-- Name: idempotency_keys pk_idempotency_keys; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT pk_idempotency_keys PRIMARY KEY (token, key);


--
-- Name: probes pk_probes; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.probes
    ADD CONSTRAINT pk_probes PRIMARY KEY (hardware_key, stack_key, shapes_key);


--
-- Name: searches pk_searches; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.searches
    ADD CONSTRAINT pk_searches PRIMARY KEY (search_id);


--
-- Name: stacks pk_stacks; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.stacks
    ADD CONSTRAINT pk_stacks PRIMARY KEY (key);


--
-- Name: tokens pk_tokens; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT pk_tokens PRIMARY KEY (name);


--
-- Name: trials pk_trials; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.trials
    ADD CONSTRAINT pk_trials PRIMARY KEY (id);


--
-- Name: workloads pk_workloads; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.workloads
    ADD CONSTRAINT pk_workloads PRIMARY KEY (key);


--
-- Name: trials uq_trials_attempt; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.trials
    ADD CONSTRAINT uq_trials_attempt UNIQUE (hardware_key, stack_key, workload_key, config_key, memory_limit_bytes, attempt);


--
-- Name: ix_audit_search_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_audit_search_id ON public.audit USING btree (search_id);


--
-- Name: ix_hardware_key; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_hardware_key ON public.hardware USING btree (key);


--
-- Name: ix_searches_state; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_searches_state ON public.searches USING btree (state, started_at);


--
-- Name: ix_trials_frontier; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_trials_frontier ON public.trials USING btree (workload_key, hardware_key, stack_key, outcome, stopped_early, family, device_bytes, tokens_per_second, id);


--
-- Name: ix_trials_hardware; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_trials_hardware ON public.trials USING btree (hardware_key, id);


--
-- Name: ix_trials_search_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_trials_search_id ON public.trials USING btree (search_id);


--
-- Name: ix_trials_uid; Type: INDEX; Schema: public; Owner: -
--

CREATE UNIQUE INDEX ix_trials_uid ON public.trials USING btree (uid);


--
-- Name: ix_workloads_model; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_workloads_model ON public.workloads USING btree (model);


--
-- Name: uq_searches_digest; Type: INDEX; Schema: public; Owner: -
--

CREATE UNIQUE INDEX uq_searches_digest ON public.searches USING btree (digest) WHERE ((state)::text = ANY ((ARRAY['queued'::character varying, 'running'::character varying])::text[]));


--
-- Name: uq_tokens_digest; Type: INDEX; Schema: public; Owner: -
--

CREATE UNIQUE INDEX uq_tokens_digest ON public.tokens USING btree (digest);


--
-- Name: audit fk_audit_search_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.audit
    ADD CONSTRAINT fk_audit_search_id FOREIGN KEY (search_id) REFERENCES public.searches(search_id);


--
-- Name: events fk_events_search_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events
    ADD CONSTRAINT fk_events_search_id FOREIGN KEY (search_id) REFERENCES public.searches(search_id);


--
-- Name: idempotency_keys fk_idempotency_keys_search_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.idempotency_keys
    ADD CONSTRAINT fk_idempotency_keys_search_id FOREIGN KEY (search_id) REFERENCES public.searches(search_id);


--
-- Name: searches fk_searches_hardware_digest; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.searches
    ADD CONSTRAINT fk_searches_hardware_digest FOREIGN KEY (hardware_digest) REFERENCES public.hardware(digest);


--
-- Name: searches fk_searches_stack_key; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.searches
    ADD CONSTRAINT fk_searches_stack_key FOREIGN KEY (stack_key) REFERENCES public.stacks(key);


--
-- Name: searches fk_searches_workload_key; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.searches
    ADD CONSTRAINT fk_searches_workload_key FOREIGN KEY (workload_key) REFERENCES public.workloads(key);


--
-- Name: trials fk_trials_hardware_digest; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.trials
    ADD CONSTRAINT fk_trials_hardware_digest FOREIGN KEY (hardware_digest) REFERENCES public.hardware(digest);


--
-- Name: trials fk_trials_search_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.trials
    ADD CONSTRAINT fk_trials_search_id FOREIGN KEY (search_id) REFERENCES public.searches(search_id);


--
-- Name: trials fk_trials_stack_key; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.trials
    ADD CONSTRAINT fk_trials_stack_key FOREIGN KEY (stack_key) REFERENCES public.stacks(key);


--
-- Name: trials fk_trials_workload_key; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.trials
    ADD CONSTRAINT fk_trials_workload_key FOREIGN KEY (workload_key) REFERENCES public.workloads(key);


--
-- PostgreSQL database dump complete
--

